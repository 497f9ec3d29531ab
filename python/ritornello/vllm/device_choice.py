"""Reads the choice of our own copies, for a CUDA engine or an emulated device, from an environment
variable. The choice is not a setting, because it is for trials, not for production.
"""

import os

VARIABLE = "RITORNELLO_DEVICE"
# The two values of this environment variable.
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
