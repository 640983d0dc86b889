"""Pixels reach the model as transformers' own image processor would send them."""

import pytest
import torch
from tiny_judges import image_processor

from cast_rl.judges.images import ImageSettings, patches, usable

SETTINGS = ImageSettings.from_processor(image_processor())


def levels(*size):
    return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def theirs(images):
    out = image_processor()(list(images), return_tensors="pt")
    return out["pixel_values"].unflatten(0, (len(images), -1)), out["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("size", [(32, 40), (24, 48)])
def test_numbers_of_the_image_processor(size):
    images = levels(2, 3, *size)
    expected, (_, rows, columns) = theirs(images)
    torch.testing.assert_close(patches(images, SETTINGS), expected)
    torch.testing.assert_close(patches(images.float() / 255, SETTINGS), expected)
    assert SETTINGS.token_grid(*size) == (rows // 2, columns // 2)


@pytest.mark.parametrize("size", [(33, 45), (100, 70), (9, 14)])
def test_resized_as_the_image_processor_does(size):
    """Up to a level or two of 255 here and there, which its integer arithmetic rounds otherwise."""
    images = torch.nn.functional.interpolate(levels(2, 3, 8, 8).float(), size, mode="bilinear").round().byte()
    expected, (_, rows, columns) = theirs(images)
    assert SETTINGS.token_grid(*size) == (rows // 2, columns // 2)
    off = (patches(images, SETTINGS) - expected).unflatten(-1, (3, -1)).abs() * 255
    off = off * torch.tensor(SETTINGS.std)[:, None]
    assert off.max() < 2.01 and off.mean() < 0.25


def test_rounding_to_8_bits_is_that_of_a_saved_image():
    image = torch.rand(1, 3, 32, 32)
    saved = (image * 255).round().byte()
    assert torch.equal(patches(image, SETTINGS), patches(saved, SETTINGS))
    half = image.bfloat16()
    assert torch.equal(patches(half, SETTINGS), patches(half.float(), SETTINGS))


def test_usable():
    images = torch.rand(4, 3, 16, 16)
    images[1, 2, 3, 3] = torch.nan
    images[2, 0, 0, 0] = torch.inf
    images[3, 0, 0, 0] = 1.0005  # a decoder's rounding
    assert usable(images).tolist() == [True, False, False, True]
    assert usable(levels(2, 3, 16, 16)).tolist() == [True, True]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.full((1, 3, 8, 8), -1.0), "from -1 to -1; clamp"),
        (torch.full((1, 3, 8, 8), 255.0), "from 255 to 255; clamp"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), "torch.int64"),
    ],
)
def test_other_pixels_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        usable(images)


def test_an_unknown_image_processor_is_refused():
    processor = image_processor()
    processor.do_normalize = False
    with pytest.raises(ValueError, match="do_normalize=False; only True"):
        ImageSettings.from_processor(processor)
