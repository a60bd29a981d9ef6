"""Times requests, stages, locks and copies on the caller's thread; folds them into counts that a worker reads.

`core` chooses between the C core and its pure-Python twin; both behave alike.
"""
