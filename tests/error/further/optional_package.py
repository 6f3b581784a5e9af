"""An optional package is missing, and the library raises an ImportError of its own from that."""

from types import SimpleNamespace

EXPECT = {"code": "error/module-not-found", "names": ["flash_attn_x"]}


def get_attention(kind):
    if kind == "flash":
        try:
            from flash_attn_x import flash_attn_func
        except ImportError as e:
            raise ImportError("attention='flash' wants the flash attention package") from e
        return flash_attn_func
    import torch.nn.functional as F

    return F.scaled_dot_product_attention


class Config:
    attention = "flash"


def build(fixed=False):
    cfg = Config()
    if fixed:
        cfg.attention = "sdpa"
    return SimpleNamespace(trigger=lambda: {k: get_attention(getattr(cfg, k)) for k in ("attention",)})
