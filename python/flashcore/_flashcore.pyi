from types import NotImplementedType
from typing import Any, final

__all__ = ["Array", "adopt_torch", "attend_arrays", "attend_dispatched", "attend_torch", "finish_compiling", "info"]

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
def finish_compiling() -> None: ...
def info() -> dict[str, Any]: ...
