"""Whether our own copies serve a CUDA engine: an environment variable, because the choice is for
trying them, not for operators to keep.
"""

import os

VARIABLE = "RITORNELLO_DEVICE"
# Values of the variable.
OWN, EMULATED = "own", "emulated"


def chosen() -> str:
    """Returns the value of the variable; "" if it is not set. ValueError for other values."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", OWN, EMULATED):
        raise ValueError(
            f"{VARIABLE} is {value!r}: set it to {OWN} for Ritornello's own copies between the GPU "
            "and the store, or leave it unset for vLLM's copies"
        )
    return value
