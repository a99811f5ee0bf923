from typing import Any, final

__all__ = [
    "Array",
    "Blocks",
    "Rule",
    "VERSION",
    "adopt_torch",
    "append",
    "attend",
    "attend_backward",
    "combine",
    "finish_compiling",
    "forked",
    "info",
    "merge",
    "panic",
    "plan_for",
    "xla_call",
    "xla_target",
]

VERSION: str

@final
class Array:
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

@final
class Blocks:
    def __new__(cls, rule: Rule, tensors: tuple[Any, ...], /) -> Blocks: ...

@final
class Rule:
    def __new__(cls, text: str, /) -> Rule: ...
    @property
    def text(self) -> str: ...

def adopt_torch(torch: Any) -> None: ...
def attend(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: Any, entrance: str,
    rules: tuple[Any, ...] | None = None, /
) -> Any: ...
def attend_backward(
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    saved: tuple[Any, ...],
    gradients: tuple[Any, ...],
    deterministic: bool,
    rules: tuple[Any, ...] | None = None,
    /,
) -> bool: ...
def plan_for(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, chip: str, backward: bool = False, /
) -> tuple[str, str, str | None, str]: ...
def xla_call(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, /
) -> tuple[dict[str, Any], tuple[list[int], str, list[int]]]: ...
def xla_target(name: str, platform: str, /) -> Any: ...
def append(
    tensors: tuple[Any, ...], flags: tuple[Any, ...], entrance: str, /
) -> Any: ...
def combine(tensors: tuple[Any, ...], dtype: str | None, entrance: str, /) -> Any: ...
def merge(tensors: tuple[Any, ...], entrance: str, /) -> Any: ...
def finish_compiling() -> None: ...
def forked() -> None: ...
def panic(text: str) -> None: ...
def info() -> dict[str, Any]: ...
