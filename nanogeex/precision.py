"""What precision a processor is quick in.

Tests: tests/test_config.py, tests/test_decoder.py.
"""

import torch

from nanogeex.config import TrainConfig


def default_precision(config: TrainConfig, device: torch.device) -> str:
    """CUDA: fp16 for the 13B model, as it was trained, and where there is no bf16, else bf16.  CPU:
    bf16 where products are large and the processor multiplies it natively; where it does not, fp32
    was 4 times faster."""
    if device.type == "cuda":
        old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
        return "fp16" if config.preset == "codegeex-13b" or old else "bf16"
    return "bf16" if cpu_multiplies_bf16() and config.hidden_size >= 512 else "fp32"


def cpu_multiplies_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
