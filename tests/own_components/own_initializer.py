"""An initialiser of one's own, in one file: all weights are a constant."""

from dataclasses import dataclass

from pibroch.config.initializer import InitializerConfig


class ConstantConfig(InitializerConfig):
    value: float = 0.1


@dataclass(frozen=True, slots=True)
class Constant:
    section = ConstantConfig
    value: float = 0.1

    def fill(self, weights, rows, key):
        weights[:] = self.value
