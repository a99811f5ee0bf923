from types import NotImplementedType
from typing import Any, final

__all__ = [
    "Array",
    "adopt_torch",
    "append",
    "attend_arrays",
    "attend_dispatched",
    "attend_sequences",
    "attend_torch",
    "combine",
    "finish_compiling",
    "info",
    "merge",
]

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

def adopt_torch(torch: Any) -> None: ...
def attend_torch(
    q: Any, k: Any, v: Any, scale: float | None, causal: bool, lse: bool, pytorch: bool, /
) -> Any | NotImplementedType | None: ...
def attend_dispatched(
    q: Any, k: Any, v: Any, scale: float | None, causal: bool, lse: bool, /
) -> Any: ...
def attend_arrays(
    q: Any, k: Any, v: Any, scale: float | None, causal: bool, pytorch: bool, words: bool, /
) -> tuple[Array, Array]: ...
def attend_sequences(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], function: str, lse: bool, entrance: str, /
) -> Any: ...
def append(
    tensors: tuple[Any, ...], flags: tuple[bool, bool], max_seqlen_q: int | None, entrance: str, /
) -> Any: ...
def combine(tensors: tuple[Any, ...], dtype: str | None, entrance: str, /) -> Any: ...
def merge(tensors: tuple[Any, ...], entrance: str, /) -> Any: ...
def finish_compiling() -> None: ...
def info() -> dict[str, Any]: ...
