"""Shared fixtures. Tests run on one thread, offline, and without the libraries' progress bars."""

import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from tiny_families import TINY


@pytest.fixture(autouse=True, scope="session")
def quiet_and_single_threaded():
    torch.set_num_threads(1)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """From the name of a pipeline class to a folder in diffusers' format that holds a tiny one."""

    @functools.cache
    def save(pipeline_class):
        folder = tmp_path_factory.mktemp(pipeline_class)
        torch.manual_seed(0)
        TINY[pipeline_class]().save_pretrained(folder, safe_serialization=True)
        return folder

    return save


@pytest.fixture(scope="session")
def load_stock(tiny_folder):
    """From the name of a pipeline class, and a dtype, to the stock pipeline, freshly loaded and frozen.

    It is frozen because on a CPU the kernel of a convolution depends on whether its weights require a gradient.
    """

    def load(pipeline_class, dtype=torch.float32):
        pipe = DiffusionPipeline.from_pretrained(tiny_folder(pipeline_class), dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False)
        return pipe

    return load


@pytest.fixture(scope="session")
def shared_stock(load_stock):
    """The same, loaded once: for tests that only call it."""
    return functools.cache(load_stock)


@pytest.fixture(scope="session")
def qwen_folder(tiny_folder):
    """A tiny Qwen-Image pipeline in diffusers' format on disk."""
    return tiny_folder("QwenImagePipeline")


@pytest.fixture
def qwen_pipe(load_stock):
    """The stock pipeline, freshly loaded."""
    return load_stock("QwenImagePipeline")
