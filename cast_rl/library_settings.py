"""Settings that are handed to other libraries: as plain data, and with errors that say what setting they are about."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


def model_quantization(key: str, spec: Any, configs: Mapping[str, type], library: str) -> Any:
    """A library's own quantization config of one model.

    Args:
        key: the setting's name, for messages.
        spec: arguments of the config's class plus ``backend``, such as
            ``{"backend": "bitsandbytes_4bit", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}``.
        configs: the library's classes by backend.
        library: its name.

    Raises:
        ValueError: a backend or an argument that does not exist, or arguments that the class refuses.
        ImportError: the backend's package is not installed.
    """
    spec = plain(spec)
    backend = spec.get("backend") if isinstance(spec, Mapping) else spec
    if not isinstance(spec, Mapping) or not isinstance(backend, str) or backend not in configs:
        raise ValueError(f"{key}.backend={backend!r} is none of {library}: {', '.join(sorted(configs))}")
    arguments = {name: value for name, value in spec.items() if name != "backend"}
    config = configs[backend]
    # bitsandbytes' config drops what it does not know.
    known = set(inspect.signature(config.__init__).parameters) - {"self", "kwargs"}
    for argument in arguments:
        if argument not in known:
            near = nearest(argument, sorted(known))
            raise ValueError(f"{key}.{argument} is no argument of {config.__name__}{near}; {sorted(known)} are")
    # Two backends share bitsandbytes' config, which is 4 or 8 bits wide by its flags alone.
    flag = {"bitsandbytes_4bit": "load_in_4bit", "bitsandbytes_8bit": "load_in_8bit"}.get(backend)
    flags = [name for name in ("load_in_4bit", "load_in_8bit") if arguments.get(name)]
    if flag and flags != [flag]:
        raise ValueError(f"{key}: backend {backend} needs {flag}: true and no other width, got {flags or 'neither'}")
    with named(key):
        return config.from_dict(arguments)


def check_quantized(key: str, spec: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a model that was to be quantized and is not."""
    if getattr(model, "hf_quantizer", None) is None:
        raise ValueError(f"{key}={dict(spec)} left {type(model).__name__} as it was")


@contextmanager
def named(key: str) -> Iterator[None]:
    """Errors of the library say what setting they are about."""
    try:
        yield
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error
    except ImportError as error:
        raise ImportError(f"{key}: {error}; install the package, or leave this setting out") from error


def nearest(word: str, words: Sequence[str]) -> str:
    """``, did you mean ...`` for the one of `words` that is most like `word`, or nothing."""
    near = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {near[0]}" if near else ""


def plain(settings: Any) -> Any:
    """Mappings and lists, OmegaConf's among them, as dicts and lists, which the libraries check for."""
    if isinstance(settings, Mapping):
        return {str(key): plain(value) for key, value in settings.items()}
    if not isinstance(settings, str) and hasattr(settings, "__iter__"):
        return [plain(value) for value in settings]
    return settings
