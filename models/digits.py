"""Writes handwritten digits as the input of `models/mlp.py`, without a download.

    python models/digits.py -o digits.npz --count 128

The 1,797 images of 8x8 pixels in scikit-learn (Alpaydin & Kaynak, 1998, the test half of the UCI
set) are resized to 28x28, the size of MNIST. The file has one array, `x` [count, 1, 28, 28] float32
from 0 (paper) to 1 (ink).
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.images import handwritten_digits, resize

Array = npt.NDArray[np.float32]


def digits(count: int | None = None, start: int = 0, size: int = 28) -> Array:
    """Images [count, 1, size, size] from number `start` on; by default all that follow.

    Raises:
        ValueError: there are fewer images.
    """
    images, _ = handwritten_digits()
    stop = len(images) if count is None else start + count
    if not 0 <= start < stop <= len(images):
        raise ValueError(f"images {start} to {stop}: expected a range within 0 to {len(images)}")
    # All are resized: the rounding of a matrix product depends on its number of rows.
    return resize(images, size)[start:stop, None]


def main() -> None:
    """Write the digits to a file; a mistake ends the process with code 2."""
    parser = argparse.ArgumentParser(description="Write handwritten digits as an .npz file.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--count", type=int, help="how many; all by default")
    parser.add_argument("--start", type=int, default=0, help="the number of the first one")
    options = parser.parse_args()
    try:
        images = digits(options.count, options.start)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        np.savez(options.output, x=images)
    except (ValueError, OSError, InputError) as error:
        parser.error(str(error))
    print(f"{options.output}: x {images.shape} float32")


if __name__ == "__main__":
    main()
