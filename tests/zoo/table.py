"""All architectures of the zoo."""

from __future__ import annotations

from tests.zoo.architecture import Architecture
from tests.zoo.diffusion import DIFFUSIONS
from tests.zoo.encoders import ENCODERS, PAIRS
from tests.zoo.graphs import GRAPHS
from tests.zoo.language import DECODERS, MIXTURES, RECURRENT, STATE_SPACE
from tests.zoo.perception import AUDIOS, CONVOLUTIONALS, MULTIMODALS, TIME_SERIES, VISIONS

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for family in (
        DECODERS, ENCODERS, PAIRS, MIXTURES, STATE_SPACE, RECURRENT, CONVOLUTIONALS, VISIONS, AUDIOS, MULTIMODALS,
        TIME_SERIES, DIFFUSIONS, GRAPHS,
    )
    for architecture in family
}  # fmt: skip
