"""Files in the released layout, made for tests."""

import math
from pathlib import Path

import torch

from nanogeex.config import ModelConfig
from nanogeex.mesh import Mesh
from nanogeex.parameters import split_table
from nanogeex.released_layout import nest
from nanogeex.sources import on_meta

TINY = Path(__file__).parent / "cases/codegeex-layout/tiny.pt"
ODD = ModelConfig(3, 40, 5, 10, 515, 515)       # cut by 5; nothing in it is a power of two


def tensors(config: ModelConfig, dtype: torch.dtype, scale: float = 0.1) -> dict:
    """Our names -> whole tensors, of which no two rows are alike."""
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(5)) * scale
    made = {}
    for number, (name, split) in enumerate(split_table(on_meta(config, Mesh())).items()):
        count = math.prod(split.shape)
        repeats = -(-(count + number) // len(block))
        made[name] = block.repeat(repeats)[number:number + count].to(dtype).view(split.shape)
    return made


def write(path: Path, config: ModelConfig, dtype: torch.dtype = torch.float16) -> Path:
    torch.save(nest(tensors(config, dtype), 1), path)
    return path


def flat(content: dict, path: str = "") -> dict:
    """Nested dictionaries -> paths with slashes -> tensors, in order."""
    found = {}
    for key, value in content.items():
        inner = f"{path}/{key}" if path else key
        found |= flat(value, inner) if isinstance(value, dict) else {inner: value}
    return found
