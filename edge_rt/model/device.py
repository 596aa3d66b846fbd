"""Where the large products of calibration and evaluation run: NumPy, or torch on a CUDA GPU.

The code that computes is written once against the Python array API standard and takes the arrays
that a Device makes. NumPy is the CPU's: on 2 cores of an AMD EPYC its float32 products ran at 135
GFLOP/s where torch's ran at 84.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_rt.errors import ConfigError, MissingLibraryError

# A NumPy array or a torch tensor: the array API standard has no static type yet.
Array: TypeAlias = Any
DeviceName = Literal["cpu", "cuda", "torch-cpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """Makes arrays for one device and brings them back."""

    name: DeviceName

    @classmethod
    def open(cls, name: DeviceName = "cpu") -> Device:
        """ConfigError where the machine has no such device, MissingLibraryError without torch."""
        if name == "cpu":
            return cls(name)
        try:
            import torch
        except ImportError as error:
            raise MissingLibraryError("torch", "quantize-torch") from error
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch finds no CUDA GPU; check nvidia-smi and that this torch is a "
                "CUDA build, or use --device cpu"
            )
        # TF32 products would keep 10 bits of what they multiply.
        torch.backends.cuda.matmul.allow_tf32 = False
        return cls(name)

    @property
    def batch_tokens(self) -> int:
        """Tokens of one forward pass: enough to fill the device, few enough to stay in caches."""
        return 16384 if self.name == "cuda" else 1024

    def array(self, value: npt.NDArray[Any]) -> Array:
        """`value` on the device, with the same type."""
        if self.name == "cpu":
            return value
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return tensor.to("cuda") if self.name == "cuda" else tensor

    def numpy(self, value: Array) -> npt.NDArray[Any]:
        """`value` in host memory."""
        if self.name == "cpu":
            host: npt.NDArray[Any] = value
            return host
        moved: npt.NDArray[Any] = value.cpu().numpy()
        return moved
