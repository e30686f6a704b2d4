"""Secrets in recipes: where a text is, in place of the text, which is written nowhere."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, PrivateAttr, model_validator

from pibroch.config.base import Section
from pibroch.errors import ConfigError
from pibroch.secret_file import MAX_SECRET_BYTES, read_secret_file

GIVEN = "PIBROCH_SECRET_"
"""Beginning of the variables that stand for what was given in full."""
_NAMES = re.compile(r"passw|passphrase|secret|token$|key\.pem|^ssl_key|oauthbearer\.config|jaas")


class Secret(Section):
    """A text that is kept in a variable of the environment, or in a file.

    Attributes:
        env: the variable.
        file: the file, which others cannot read.
    """

    env: str | None = None
    file: str | None = None
    _text: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("needs either `env`, a variable, or `file`")
        return self

    @classmethod
    def given(cls, name: str, text: str) -> Secret:
        """What a recipe gives in full: this process knows it, what is written names a variable.

        >>> Secret.given("kafka.sasl.password", "horse").model_dump(exclude_none=True)
        {'env': 'PIBROCH_SECRET_KAFKA_SASL_PASSWORD'}
        """
        secret = cls(env=GIVEN + re.sub(r"\W", "_", name).upper())
        secret._text = text
        return secret

    def read(self, what: str) -> str:
        """The text.

        Args:
            what: it is, for messages.

        Raises:
            ConfigError: when it is not there, or others can read the file.
        """
        if self._text is not None:
            return self._text
        if self.file is not None:
            others = stat.S_IRWXO | stat.S_IWGRP
            content = read_secret_file(Path(self.file), what, others)
            if len(content) > MAX_SECRET_BYTES:
                raise ConfigError(
                    f"{what}: {self.file} with more than {MAX_SECRET_BYTES} bytes", "a secret"
                )
            return content.decode(errors="surrogateescape")
        assert self.env is not None, "it was checked"
        if self.env not in os.environ:
            was_given = self.env.startswith(GIVEN)
            how = ", as it was given in full, which is kept nowhere" if was_given else ""
            raise ConfigError(
                f"{what}, which is to be in the variable {self.env}, and is not{how}",
                "the secret",
                f"set {self.env}, or give the secret as {{ env = NAME }} or {{ file = PATH }}",
            )
        return os.environ[self.env]


def is_secret(name: str) -> bool:
    """Whether a setting of this name is a secret.

    >>> is_secret("sasl.password"), is_secret("sasl.username")
    (True, False)
    """
    return _NAMES.search(name) is not None


def secrets_in(value: object) -> Iterator[Secret]:
    """All secrets of a configuration, or of a part of one."""
    if isinstance(value, Secret):
        yield value
    elif isinstance(value, BaseModel):
        for _, inner in value:
            yield from secrets_in(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from secrets_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from secrets_in(inner)


def hand_on(config: BaseModel) -> None:
    """Let processes that this one starts know the secrets, by their environment.

    Raises:
        ConfigError: when one is not there.
    """
    for secret in secrets_in(config):
        text = secret.read("a secret of the recipe")
        if secret.env is not None:
            os.environ[secret.env] = text


def refuse_in_full(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a ``a.b=value`` that gives a secret in full."""
    for text in overrides:
        key, _, value = text.partition("=")
        names = text if value.lstrip().startswith("{") else key  # a table has names of its own
        if is_secret(names) and not re.search(r"\b(env|file)\b", names):
            raise ConfigError(
                f"--set {key}={'***' if value else ''}, a secret in full",
                "where it is: a variable or a file",
                f"pass --set {key}.env=NAME, or --set {key}.file=PATH",
            )


def redacted(value: object, name: str = "") -> object:
    """A raw value as messages may show it.

    >>> redacted({"kafka": {"sasl.password": "horse", "sasl": {"username": "u"}}})
    {'kafka': {'sasl.password': '***', 'sasl': {'username': 'u'}}}
    """
    if isinstance(value, Mapping):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    return "***" if is_secret(name) and not isinstance(value, Secret) else value
