"""What a recipe may name by mistake."""

from pibroch.models import Model

NUMBER = 3


class NoModel:
    pass


class NoSection(Model):
    section = None  # type: ignore[assignment]

    def logits(self, dense, embeddings):
        return embeddings().sum((1, 2))
