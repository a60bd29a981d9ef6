"""What inferscope uses of it; the library is not part of the environment that types are checked in."""
