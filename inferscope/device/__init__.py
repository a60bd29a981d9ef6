"""What the accelerator did: device spans without a synchronisation, on the host's clock, and what its allocator and driver say.

Nothing here touches a device before the application used it, and nothing runs while a graph is captured.
"""
