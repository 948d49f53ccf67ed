"""Functions by which SecAgg+ makes masks and key shares."""

from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

__all__ = [
    "bytes_to_private_key",
    "bytes_to_public_key",
    "combine_shares",
    "dequantize",
    "factor_extract",
    "generate_shared_key",
    "get_parameters_shape",
    "parameters_addition",
    "parameters_mod",
    "parameters_subtraction",
    "pseudo_rand_gen",
]
