"""The file of a model's weights, beside the graph."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

WEIGHTS_FILE = "weights.bin"

_ALIGN_BYTES = 4096  # pages: ONNX Runtime maps external weights instead of reading them
_INLINE_BYTES = 1024

Array = npt.NDArray[Any]


class Weights:
    """weights.bin, written front to back; each tensor is released once it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def tensor(self, name: str, array: Array) -> TensorProto:
        """An initializer: small ones inline, others in the file."""
        array = np.ascontiguousarray(array)
        if array.nbytes < _INLINE_BYTES:
            return numpy_helper.from_array(array, name)
        self._file.write(b"\0" * (-self._file.tell() % _ALIGN_BYTES))
        tensor = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", WEIGHTS_FILE),
            ("offset", self._file.tell()),
            ("length", array.nbytes),
        ):
            tensor.external_data.add(key=key, value=str(value))
        array.tofile(self._file)
        return tensor
