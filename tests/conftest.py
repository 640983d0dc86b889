"""Shared fixtures. Tests run on one thread, offline, and without the libraries' progress bars."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from tiny_pipelines import qwen_image_pipeline


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
def qwen_folder(tmp_path_factory):
    """A tiny Qwen-Image pipeline in diffusers' format on disk."""
    folder = tmp_path_factory.mktemp("tiny-qwen-image")
    qwen_image_pipeline().save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture
def qwen_pipe(qwen_folder):
    """The stock pipeline, freshly loaded."""
    pipe = DiffusionPipeline.from_pretrained(qwen_folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe
