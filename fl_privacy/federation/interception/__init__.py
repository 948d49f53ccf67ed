"""Interception of uploads: observations with an attacker's knowledge, and their files."""

from fl_privacy.federation.interception.capture_writer import (
    CaptureWriter as CaptureWriter,
    ObservationBuffer as ObservationBuffer,
    save_observation as save_observation,
)
from fl_privacy.federation.interception.captures import (
    by_id as by_id,
    changed as changed,
    ids_of as ids_of,
    load_observations as load_observations,
    only as only,
    stored_observations as stored_observations,
)
from fl_privacy.federation.interception.infer_plan import (
    at_typical_rates as at_typical_rates,
    describe_model as describe_model,
    recognize_training as recognize_training,
)
from fl_privacy.federation.interception.interceptor import (
    ACTIVATION as ACTIVATION,
    Interceptor as Interceptor,
    SimulatedSideInformation as SimulatedSideInformation,
    States as States,
)
