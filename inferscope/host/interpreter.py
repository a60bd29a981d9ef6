"""Where the interpreter keeps its own state in memory: a thread that waits for the interpreter lock waits at an address in there."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["runtime_range"]


class _SharedObject(ctypes.Structure):
    _fields_ = (("fname", ctypes.c_char_p), ("fbase", ctypes.c_void_p), ("sname", ctypes.c_char_p), ("saddr", ctypes.c_void_p))


class _Symbol(ctypes.Structure):
    """Elf64_Sym."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_ubyte),
        ("other", ctypes.c_ubyte),
        ("shndx", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def runtime_range() -> tuple[int, int] | None:
    """Addresses [low, high) of the interpreter's state, by dladdr1 with RTLD_DL_SYMENT; None where that cannot be known."""
    try:
        address = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        dladdr1: Any = ctypes.CDLL(None).dladdr1
        info, symbol = _SharedObject(), ctypes.POINTER(_Symbol)()
        dladdr1.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SharedObject), ctypes.c_void_p, ctypes.c_int]
        found = dladdr1(address, ctypes.byref(info), ctypes.byref(symbol), 1)
        if not found or not symbol or info.sname != b"_PyRuntime" or symbol.contents.size <= 0:
            return None
        return address, address + int(symbol.contents.size)
    except (ValueError, OSError, AttributeError):
        return None
