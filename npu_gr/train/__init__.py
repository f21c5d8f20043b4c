"""Trainers. The package itself can be called: `npu_gr.train(log)` is `npu_gr.tools.site.train`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Trainers(ModuleType):
    def __call__(self, *args: Any, **named: Any) -> Any:
        """Prepare a log and train its site; see `npu_gr.tools.site.train`."""
        # by name: the trainers are below the tools, and load only what they need
        return import_module("npu_gr.tools.site").train(*args, **named)


sys.modules[__name__].__class__ = _Trainers
