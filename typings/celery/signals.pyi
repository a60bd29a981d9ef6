from collections.abc import Callable
from typing import Any

class Signal:
    def connect(self, receiver: Callable[..., Any]) -> object: ...
    def disconnect(self, receiver: Callable[..., Any]) -> object: ...

before_task_publish: Signal
task_prerun: Signal
task_failure: Signal
task_postrun: Signal
