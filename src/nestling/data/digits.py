"""scikit-learn's 8x8 handwritten digits: 1797 real images that come inside a wheel, so nothing is downloaded.

Goes out: a DataSet of 1437 training and 360 test images, 1 channel, split by class once and for all. Training
crops shift by at most one pixel and are never mirrored: a mirrored digit is not a digit.
"""

import numpy as np
import torch

from nestling.data.dataset import DataSet, Images, channel_statistics, fixed_shuffle, in_memory
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe

CLASSES = tuple("0123456789")
TEST = 360


def load(recipe: DataRecipe, device: torch.device | str = "cpu") -> DataSet:
    images = read()
    mean, std = channel_statistics(images.train)
    return in_memory(images, recipe, CLASSES, mean, std, device, pad=1, flip=False)


def read() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise NestlingError(
            "the digits come with scikit-learn, which is not installed; run: pip install 'nestling[data]'"
        ) from error
    found = load_digits()
    # Pixels are whole numbers from 0 to 16.
    pixels = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(found.target.astype(np.int64))
    train, test = stratified(found.target)
    return Images(pixels[train], labels[train], pixels[test], labels[test])


def stratified(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions for training and for test, every class with the same share in both (to a whole image)."""
    shuffled = fixed_shuffle(len(labels))
    # Sorting the shuffle by class and taking evenly spaced positions takes the same share of every class.
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    taken = np.floor((np.arange(TEST) + 0.5) * len(labels) / TEST).astype(int)
    return np.sort(np.delete(by_class, taken)), np.sort(by_class[taken])
