"""All architectures of the zoo."""

from __future__ import annotations

from tests.zoo.architecture import Architecture
from tests.zoo.encoders import ENCODERS, PAIRS
from tests.zoo.language import DECODERS, MIXTURES, RECURRENT, STATE_SPACE
from tests.zoo.perception import AUDIOS, CONVOLUTIONALS, MULTIMODALS, TIME_SERIES, VISIONS

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for family in (
        DECODERS, ENCODERS, PAIRS, MIXTURES, STATE_SPACE, RECURRENT, CONVOLUTIONALS, VISIONS, AUDIOS, MULTIMODALS,
        TIME_SERIES,
    )
    for architecture in family
}  # fmt: skip
