from typing import Any, final

__all__ = [
    "Array",
    "Blocks",
    "Distribution",
    "Kernels",
    "Rule",
    "VERSION",
    "adopt_torch",
    "append",
    "append_plan_for",
    "are_plain_halves",
    "attend",
    "attend_backward",
    "combine",
    "empty_like",
    "finish_compiling",
    "forked",
    "info",
    "is_small_float",
    "leave_others_to",
    "merge",
    "panic",
    "plan_for",
    "serve",
    "tensor_names",
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
    def __new__(cls) -> Blocks: ...

@final
class Distribution:
    def __new__(
        cls,
        ranks: int,
        lengths: list[int],
        batch: int | None,
        window: tuple[int | None, int | None],
        variant: str,
        nodes: int,
        order: str,
        heads: tuple[int, int, int, int, int],
        /,
    ) -> Distribution: ...
    @property
    def nodes(self) -> int: ...
    @property
    def members(self) -> int: ...
    @property
    def gathers_all(self) -> bool: ...
    def pieces(self, rank: int, /) -> list[tuple[int, tuple[int, int]]]: ...
    def exchanged(self, member: int, /) -> list[tuple[int, tuple[int, int]]]: ...
    def heads(self, node: int, /) -> tuple[tuple[int, int], list[int]]: ...
    def steps(self, rank: int, /) -> list[Any]: ...
    def gathered(self, rank: int, /) -> list[tuple[int, tuple[int, int]]]: ...
    def sent(self, rank: int, /) -> tuple[int, int]: ...

@final
class Kernels:
    @staticmethod
    def register(file: str, namespace: str, key: str, refuse: Any = None, /) -> Kernels | None: ...
    @property
    def operators(self) -> list[str]: ...
    def remove(self) -> None: ...

@final
class Rule:
    def __new__(cls, text: str, /) -> Rule: ...
    @property
    def text(self) -> str: ...

def adopt_torch(torch: Any) -> None: ...
def attend(
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    function: str,
    lse: Any,
    entrance: str,
    rules: tuple[Any, ...] | None = None,
    /,
) -> Any: ...
def serve(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: Any, deterministic: Any, /
) -> Any: ...
def leave_others_to(function: Any, /) -> None: ...
def are_plain_halves(tensors: tuple[Any, ...], /) -> bool: ...
def is_small_float(thing: Any, /) -> bool: ...
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
def tensor_names(function: str, /) -> tuple[str, ...]: ...
def empty_like(tensors: tuple[Any, ...], /) -> tuple[Any, ...]: ...
def plan_for(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, chip: str, backward: bool = False, /
) -> tuple[str, str, str | None, str]: ...
def append_plan_for(tensors: tuple[Any, ...], flags: tuple[Any, ...], chip: str, /) -> tuple[str, int]: ...
def xla_call(tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, /) -> tuple[dict[str, Any], str]: ...
def xla_target(name: str, platform: str, /) -> Any: ...
def append(tensors: tuple[Any, ...], flags: tuple[Any, ...], entrance: str, /) -> Any: ...
def combine(tensors: tuple[Any, ...], dtype: str | None, entrance: str, /) -> Any: ...
def merge(tensors: tuple[Any, ...], entrance: str, /) -> Any: ...
def finish_compiling() -> None: ...
def forked() -> None: ...
def panic(text: str) -> None: ...
def info() -> dict[str, Any]: ...
