"""What a configuration of Keras says of compressors and exchanges, which Keras does not know."""

from __future__ import annotations

from typing import Any

from hvd_compress.compressors import Compressor, from_config
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange import Exchange, unchecked
from hvd_compress.policy import Policy, horovods_own

__all__ = ["compression_of", "exchange_of", "saved_compression"]


def saved_compression(compression: Any) -> dict[str, Any]:
    """A compressor or a `Policy` as a JSON-able dict.

    Raises:
        UnsupportedError: one that was written for Horovod.
    """
    ours = horovods_own(compression)
    if isinstance(ours, Compressor):
        # what a parameter server makes of it is no setting of the user's
        ours = unchecked(ours)
    if not hasattr(ours, "get_config"):
        raise UnsupportedError(
            f"a configuration with compression={compression!r}, which has no settings to save: use a compressor of "
            "hvd_compress, or save the model's weights alone"
        )
    config: dict[str, Any] = ours.get_config()
    return config


def compression_of(config: Any) -> Any:
    """What `saved_compression` was given; what is no such dict stays as it is."""
    if not isinstance(config, dict):
        return config
    if config.get("id") != "policy":
        return from_config(config)
    rules = [(pattern, from_config(rule)) for pattern, rule in config["rules"]]
    return Policy(rules, from_config(config["default"]))


def exchange_of(config: Any) -> Any:
    """The exchange of a configuration; what is no such dict stays as it is.

    Raises:
        ValueError: an exchange whose class was not imported.
    """
    return Exchange.from_config(config) if isinstance(config, dict) else config
