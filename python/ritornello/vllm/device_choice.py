"""Reads from an environment variable whether Ritornello itself copies pages between the store and a
CUDA device or an emulated device. This choice is not a setting, because it is for trials only.
"""

import os

VARIABLE = "RITORNELLO_DEVICE"
# The permitted values of this variable.
OWN, EMULATED = "own", "emulated"


def chosen() -> str:
    """Returns the value of the environment variable; "" if it is not set. Raises ValueError if the
    value is neither `OWN` nor `EMULATED`.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", OWN, EMULATED):
        raise ValueError(
            f"{VARIABLE} is {value!r}: set it to {OWN} for Ritornello's own copies between the GPU "
            "and the store, or leave it unset for vLLM's copies"
        )
    return value
