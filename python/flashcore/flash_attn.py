"""FlashAttention-2's functions with its order of arguments: ``from flashcore.flash_attn import ...``."""

from .compat.flash_attn import *  # noqa: F403
