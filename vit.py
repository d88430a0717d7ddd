"""vit.py: the Vision Transformer in one file, to be read from top to bottom, and to be run.

The idea in six steps, after Dosovitskiy et al., "An Image is Worth 16x16 Words" (2010.11929):

  1. Cut the image into square patches and turn each into a vector: a token.           Section 2
  2. Let every token gather what it needs from all the others: attention.              Section 3
  3. Let every token think about what it gathered: an MLP. Both together: a block.     Section 4
  4. Add one token that belongs to no patch, tell each token where it lies, and stack
     blocks. A linear layer reads the class from that one token.                       Section 5
  5. Show it labelled images, each time a little altered, and lower its loss.          Sections 6-8
  6. Ask it where it looked.                                                           Section 9

Commands (each has --help):

  python vit.py train --data shapes --epochs 5       nothing to download: minutes on a laptop
  python vit.py train --epochs 100                   CIFAR-10, the default model and recipe
  python vit.py train --resume vit.pt                go on where a run was stopped
  python vit.py viz --ckpt vit.pt --image cat.png    what did it look at?

Measured (last epoch, seed 0, 2 CPU cores with bf16 matrix units, README.md has more):

MEASURED

Left out, so that what is here can be read: several devices and worker processes (a model of this
size trains on one device, its data fit in that device's memory), pre-trained weights (the point is
to see it learn from nothing), distillation, convolutional stems and the many other variants (this
is the plain ViT; where it departs from the paper, a comment begins with "paper:").

Contents:
   1. Symbols and configuration     6. Data and augmentation
   2. Patches                       7. Optimisation
   3. Attention                     8. Evaluation, training, checkpoints
   4. MLP, drop path, block         9. Seeing: attention, rollout, the picture
   5. The Vision Transformer       10. The command line
"""

# ---- 1. Symbols and configuration -----------------------------------------------------------------
#
# One letter, one meaning, in every comment of this file:
#
#   B  images in a batch              N  tokens: one per patch and the class token, 1 + (H/P)(W/P)
#   C  channels of an image           D  width: numbers in a token (`dim`)
#   H  height of an image, pixels     h  heads in an attention layer (`num_heads`)
#   W  width of an image, pixels      d  width of one head, D / h
#   P  side of a patch, pixels        L  blocks (`depth`)
#                                     K  classes
# paper: its N counts the patches only; ours counts the class token too.

import argparse
import csv
import math
import os
import shutil
import sys
import time
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageOps
from torch import nn
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

__version__ = "0.1.0"


class InputError(ValueError):
    """Something the user gave cannot work. The message says what, and what to do about it."""


def option(default, help, low=None, high=None, choices=None, group="run"):
    """A configuration field. `help` is the comment you read here and the text of --help."""
    return field(default=default, metadata={
        "help": help, "low": low, "high": high, "choices": choices, "group": group})


def check_options(config):
    """Hold every field against its range and choices. Raises InputError."""
    for f in fields(config):
        value, name = getattr(config, f.name), "--" + f.name.replace("_", "-")
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if low is not None and not low <= value <= high:        # NaN fails this too
            raise InputError(f"{name} must lie between {low} and {high}, not {value}")
        choices = f.metadata.get("choices")
        if choices and value not in choices:
            raise InputError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


@dataclass(frozen=True)
class ViTConfig:
    """What the model is. Raises InputError when the numbers do not fit together."""
    image_size: int = option(32, "side of the square input, in pixels", 1, 4096, group="model")
    patch_size: int = option(4, "side of a patch, in pixels", 1, 4096, group="model")
    in_channels: int = 3        # from the data, not from the command line
    num_classes: int = 10       # from the data, not from the command line
    dim: int = option(192, "width D of a token", 1, 16384, group="model")
    depth: int = option(6, "number L of blocks", 1, 256, group="model")
    num_heads: int = option(3, "attention heads h in a block", 1, 256, group="model")
    mlp_ratio: float = option(4.0, "hidden width of the MLP over dim", 0.1, 64, group="model")
    dropout: float = option(0.0, "share of activations dropped", 0, 0.99, group="model")
    drop_path: float = option(0.0, "share of residual branches dropped in the last block; it "
                              "grows from 0 in the first", 0, 0.99, group="model")

    def __post_init__(self):
        check_options(self)
        if self.image_size % self.patch_size:
            raise InputError(f"--image-size {self.image_size} is not a multiple of --patch-size "
                             f"{self.patch_size}; change one of them")
        if self.dim % self.num_heads:
            raise InputError(f"--dim {self.dim} cannot be shared among --num-heads "
                             f"{self.num_heads}; make dim a multiple of it")


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained. Raises InputError when a value is out of its range."""
    data: str = option("cifar10", "cifar10, shapes (built in), or a folder with train/CLASS/* and "
                       "test/CLASS/* (or val/CLASS/*)", group="data")
    out: str = option("vit.pt", "the checkpoint; the log (.csv) and the curves (.png) go beside it")
    resume: str = option("", "go on with the run in this checkpoint; its settings are kept")
    epochs: int = option(100, "passes over the training images", 1, 100_000, group="optimisation")
    batch_size: int = option(128, "images in a step", 1, 65536, group="optimisation")
    optimizer: str = option("muon", "muon for the blocks' matrices and adamw for the rest, or "
                            "adamw for all", choices=("muon", "adamw"), group="optimisation")
    muon_lr: float = option(0.02, "peak learning rate of Muon", 0, 100, group="optimisation")
    lr: float = option(1e-3, "peak learning rate of AdamW", 0, 100, group="optimisation")
    weight_decay: float = option(0.05, "decay of weight matrices", 0, 100, group="optimisation")
    warmup: float = option(0.1, "share of the run in which the learning rate rises", 0, 0.9,
                           group="optimisation")
    label_smoothing: float = option(0.1, "share of the target spread over all classes", 0, 0.99,
                                    group="optimisation")
    clip: float = option(1.0, "largest norm of the gradient", 1e-6, 1e6, group="optimisation")
    amp: str = option("auto", "precision of the matrix products; auto: bf16 where the hardware "
                      "has it, fp16 on older CUDA devices, else off",
                      choices=("auto", "bf16", "fp16", "off"))
    device: str = option("auto", "auto: cuda, then mps, then cpu",
                         choices=("auto", "cuda", "mps", "cpu"))
    seed: int = option(0, "fixes all that is random", 0, 2**31 - 1)

    def __post_init__(self):
        check_options(self)


# ---- 2. Patches: an image becomes tokens ------------------------------------------------------------
#
# A Transformer reads a sequence of vectors. The obvious sequence is the pixels, but attention
# compares every token with every other, N x N pairs: a 224 x 224 image has 50,176 pixels and so
# 2.5 billion pairs in each head of each layer. Cut into 16 x 16 patches it has 196 tokens and 38
# thousand pairs. For CIFAR-10 (32 x 32) the same thought gives patches of 4: 8 x 8 = 64 tokens.
# (Patches of 16 would leave four tokens, and attention nothing to choose between.)
#
# Each patch, P x P pixels of C colours, is laid out as one vector of P*P*C numbers, and one learned
# matrix E maps it to D numbers:
#
#     z_i = E x_i + b,     x_i in R^(P*P*C),  E in R^(D x P*P*C)                 (paper, eq. 1)
#
# Below, E is written as a convolution whose kernel and stride are both P. It is the same sum: the
# kernel is one row of E folded to (C, P, P), and a stride of P places it on each patch once, with no
# overlap. The convolution saves us the cutting; test_vit.py cuts by hand and finds the same numbers.


class PatchEmbed(nn.Module):
    """Image to patch tokens, left to right and top to bottom: (B, C, H, W) -> (B, N-1, D)."""

    def __init__(self, config):
        super().__init__()
        P = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.dim, kernel_size=P, stride=P)

    def forward(self, images):
        x = self.proj(images)                           # (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2)             # (B, N-1, D)


# ---- 3. Attention -----------------------------------------------------------------------------------
#
# A token on a cat's ear should learn that there is another ear. So each token x_i asks a question,
# the query q_i; each token offers an answer's label, the key k_j, and the answer itself, the value
# v_j. All three are linear maps of the token. How well key j answers query i is their dot product;
# a softmax turns the scores of one query into weights that sum to 1, and the token receives the
# values' mean under these weights:
#
#     A = softmax( q k^T / sqrt(d) ),     output = A v                         (paper, eq. 6 and 7)
#
# Which axis does the softmax run over? The keys, the last one: row i of A says how token i shares out
# its attention. Over the other axis, the tokens would compete for askers.
#
# Why sqrt(d)? If the numbers in q and k have variance 1, their dot product over d numbers has variance
# d. Unscaled scores would grow with the head's width; the softmax of large scores is nearly 0 or 1,
# where its gradient vanishes, and nothing is learned.
#
# By hand, for one query and three tokens, d = 4:
#
#     q = (1, 1, 1, 1)     k_1 = (0, 0, 0, 0)    k_2 = (2, 0, 0, 0)    k_3 = (2, 2, 0, 0)
#                          v_1 = (1, 0, 0, 0)    v_2 = (0, 1, 0, 0)    v_3 = (0, 0, 1, 0)
#     q.k = 0, 2, 4        over sqrt(4): 0, 1, 2      exp: 1, 2.718, 7.389, together 11.107
#     A = .090, .245, .665                            output = (.090, .245, .665, 0)
#
# Without the division the weights would be .016, .117, .867: already close to choosing one token.
#
# Why several heads? One softmax has one focus: it cannot look at both the left ear and the tail
# without mixing them. So q, k and v are cut into h pieces of d = D / h numbers, each with a softmax of
# its own, and `proj` mixes their results (eq. 8). The cost does not change: h heads of width D / h.
#
# Note that nothing here knows where a token lies: shuffle the tokens and the outputs are shuffled the
# same way. Section 5 adds the positions.


class Attention(nn.Module):
    """Multi-head self-attention: (B, N, D) -> (B, N, D), and the weights (B, h, N, N)."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)        # the three maps in one matrix product
        self.proj = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, return_attention=False, fused=None):
        """Returns the output and the softmax weights, before dropout; None from the fused kernel.

        The fused kernel computes the same without ever storing the N x N weights. On a GPU that is
        much faster; on a CPU the lines below are. It cannot show its weights, so it stands aside
        when they are asked for.
        """
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)  # (B, N, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # three of (B, h, N, d)
        if fused is None:
            fused = x.is_cuda and not return_attention
        if fused:
            drop = self.dropout.p if self.training else 0.0
            attention, x = None, F.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])       # (B, h, N, N)
            attention = scores.softmax(dim=-1)                              # each row sums to 1
            x = self.dropout(attention) @ v                                 # (B, h, N, d)
        x = x.transpose(1, 2).reshape(B, N, D)                  # the heads side by side again
        return self.dropout(self.proj(x)), attention


# ---- 4. MLP, drop path, encoder block ---------------------------------------------------------------
#
# Attention moves information between tokens, but what it hands on is a weighted mean of linear maps:
# for fixed weights, nothing non-linear happens to the content. The MLP does the other half. It treats
# each token alone, all with the same weights: widen to four times D, bend with GELU, narrow again:
#
#     MLP(x) = W_2 GELU(W_1 x + b_1) + b_2,    GELU(t) = t * Phi(t), Phi the normal distribution
#
# GELU is a ReLU with a rounded corner: it passes large t, stops very negative t, and has a gradient
# everywhere. Two thirds of a block's weights are here.


class MLP(nn.Module):
    """The same two linear layers for each token: (B, N, D) -> (B, N, D)."""

    def __init__(self, config):
        super().__init__()
        hidden = int(config.dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.dim, hidden)
        self.fc2 = nn.Linear(hidden, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.dropout(F.gelu(self.fc1(x)))           # (B, N, 4D)
        return self.dropout(self.fc2(x))                # (B, N, D)


# A block adds what attention and MLP find to what was there already (eq. 2 and 3):
#
#     x <- x + attention(norm1(x))
#     x <- x + mlp(norm2(x))
#
# The sums are *residuals*. Each part need only learn a correction, and on the way back the gradient
# reaches every block undamped through the plus signs; without them, six layers already train badly.
#
# LayerNorm brings each token to mean 0 and variance 1, then scales and shifts by learned numbers. It
# stands *before* each part (pre-norm), inside the branch. After the sum (post-norm, as in the first
# Transformer) it would sit on the residual path itself and rescale the gradient at each block; such
# models train only with great care at the start.
#
# Drop path (stochastic depth, 1603.09382) leaves a whole branch out, for some images of a batch, while
# training: a block then cannot rely on exactly what the one before it does. The branches that stay
# are scaled up by 1 / (1 - rate), so that the expected sum is what it will be without dropping.
# paper: ViT uses dropout only; drop path came to it with DeiT (2012.12877).


class DropPath(nn.Module):
    """Zeroes a residual branch for a random share `rate` of the images: (B, N, D) -> (B, N, D)."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0:
            return x
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)      # (B, 1, 1), 0 or 1
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """One encoder block, pre-norm: (B, N, D) -> (B, N, D), and its attention weights."""

    def __init__(self, config, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config)
        self.drop_path = DropPath(drop_path)

    def forward(self, x, return_attention=False):
        out, attention = self.attn(self.norm1(x), return_attention)
        x = x + self.drop_path(out)                             # (B, N, D)
        x = x + self.drop_path(self.mlp(self.norm2(x)))         # (B, N, D)
        return x, attention


# ---- 5. The Vision Transformer ----------------------------------------------------------------------
#
# Three things are added around the blocks.
#
# *The class token.* L blocks give N tokens, but we want one answer. So a token that comes from no
# patch, the same learned vector for every image, is put in front. In each block it gathers from the
# patches whatever helps to name the class; at the end the head reads it alone. The mean of the patch
# tokens would serve about as well as input to the head; but then no single row of attention would say
# what the answer was gathered from, and that row is what section 9 draws.
#
# *The positions.* Attention and MLP do not know where a token lies: shuffle the patches, and the class
# token ends up the same. A cat with its ears below its feet would still be a cat. So a vector that
# belongs to the place is added to each token, one per place, learned like any weight:
#
#     z_0 = [cls; E x_1; ...; E x_(N-1)] + E_pos,    E_pos in R^(N x D)                   (eq. 1)
#
# They start as sine and cosine waves of the row and the column, so that from the first step on near
# places are alike and far ones differ. paper: starts them at random, and they have to discover the
# grid from data; on a small data set that is time lost.


def sincos_positions(rows, cols, dim):
    """Waves of a quarter of the width each: sin and cos of the row, sin and cos of the column.

    Returns (rows * cols, dim) float32, values in [-1, 1]; left-over channels (dim % 4) are 0.
    Wave lengths run from 2 pi to 2 pi * 10,000 places, as in "Attention Is All You Need" (3.5).
    """
    count = dim // 4
    frequency = 10_000 ** -(torch.arange(count) / max(count, 1))            # (dim/4,)
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    row = row.reshape(-1, 1) * frequency                                    # (rows*cols, dim/4)
    col = col.reshape(-1, 1) * frequency                                    # (rows*cols, dim/4)
    table = torch.cat([row.sin(), row.cos(), col.sin(), col.cos()], dim=1)
    return F.pad(table, (0, dim - 4 * count))                               # (rows*cols, dim)


# *The last LayerNorm.* In a pre-norm model the sum of all branches is never normalised on its way, so
# one more LayerNorm stands before the head (eq. 4).
#
# How the weights begin: weight matrices as normal random numbers of standard deviation 0.02, cut off
# at two deviations so that none starts as an outlier; small enough that all classes begin about
# equally likely, so the first loss is near ln K (2.30 for ten classes). Biases begin at 0. The two
# matrices that end a branch (`attn.proj`, `mlp.fc2`) begin at 0 as well: each block then starts as the
# identity, the gradient arrives everywhere at full size, and a branch grows only as far as it helps.
# paper: its code begins all of these matrices alike, by Xavier's rule.
#
# The sizes that have names. Parameters are for 1,000 classes, 224 x 224 images and patches of 16,
# except for `cifar`: 10 classes, 32 x 32, patches of 4.

VARIANTS = {
    #         dim  depth  heads      parameters    from
    "cifar": (192,    6,     3),   #  2,693,578    this file's default
    "Ti/16": (192,   12,     3),   #  5,717,416    DeiT (2012.12877)
    "S/16":  (384,   12,     6),   # 22,050,664    DeiT
    "B/16":  (768,   12,    12),   # 86,567,656    ViT (2010.11929)
    "L/16":  (1024,  24,    16),   # 304,326,632   ViT
}


class ViT(nn.Module):
    """The Vision Transformer (2010.11929, section 3.1).

    model(images): images (B, C, H, W) floats, H and W multiples of P; returns logits (B, K).
    model(images, return_attention=True): returns (logits, attention), where attention is a list of L
    tensors (B, h, N, N): the weights that multiplied v, block 1 first, part of the autograd graph.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        side = config.image_size // config.patch_size
        self.grid = (side, side)                                # rows and columns of patches
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + side * side, config.dim))
        self.dropout = nn.Dropout(config.dropout)
        last = max(config.depth - 1, 1)                         # drop path grows with the depth
        self.blocks = nn.ModuleList(Block(config, config.drop_path * i / last)
                                    for i in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.initialise()

    @torch.no_grad()
    def initialise(self):
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.zeros_(block.attn.proj.weight)
            nn.init.zeros_(block.mlp.fc2.weight)
        nn.init.trunc_normal_(self.cls_token, std=0.02, a=-0.04, b=0.04)
        nn.init.zeros_(self.pos_embed)                          # the class token lies nowhere
        self.pos_embed[0, 1:] = sincos_positions(*self.grid, self.config.dim) / 2

    def positions(self, rows, cols):
        """The position vectors for a grid of patches: (1, 1 + rows*cols, D).

        For another grid than the model was trained on, they are read as an image and resized
        (paper, section 3.2), so that a trained model can look at larger images, or oblong ones.
        """
        if (rows, cols) == self.grid:
            return self.pos_embed
        cls, patches = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        image = patches.transpose(1, 2).reshape(1, -1, *self.grid)          # (1, D, rows, cols)
        image = F.interpolate(image, size=(rows, cols), mode="bicubic")
        return torch.cat([cls, image.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, images, return_attention=False):
        B, C, H, W = images.shape
        P = self.config.patch_size
        if H % P or W % P:
            raise ValueError(f"images of {H} x {W} pixels cannot be cut into patches of {P}")
        cls = self.cls_token.expand(B, -1, -1)                  # (B, 1, D)
        x = torch.cat([cls, self.patch_embed(images)], dim=1)   # (B, N, D)
        x = self.dropout(x + self.positions(H // P, W // P))    # (B, N, D)
        attention = []
        for block in self.blocks:
            x, weights = block(x, return_attention)             # (B, N, D), (B, h, N, N)
            if return_attention:
                attention.append(weights)
        logits = self.head(self.norm(x[:, 0]))                  # (B, K)
        return (logits, attention) if return_attention else logits


# What it costs. In multiply-adds, a block on N tokens needs 3ND^2 for q, k and v, N^2 D for the
# scores, N^2 D for the weighted mean, ND^2 for `proj` and 8ND^2 for the MLP:
#
#     12 N D^2 + 2 N^2 D
#
#                               N     D     12 N D^2     2 N^2 D    a block    all L blocks
#     the default, 32/4        65   192       28.8 M       1.6 M     30.4 M          0.18 G
#     ViT-B, 224/16           197   768     1394.3 M      59.6 M   1453.9 M          17.4 G
#
# So at these sizes attention's famous N^2 is a small part, and the matrix products are the cost. With
# one token per pixel N would be 50,177 for ViT-B, and 2 N^2 D alone 3,867 G a block.
#
# Why a ViT needs more data than a CNN. A convolution is told two truths about images before it sees
# one: what matters is near (locality), and it looks the same wherever it lies (weight sharing). Its
# receptive field grows layer by layer. A ViT is told only how patches are cut; from the first block
# on any patch may look at any other, and it must learn from the data which are worth it. With hundreds
# of millions of images that freedom wins (paper, figure 3). With fifty thousand, we lend it the truths
# in another form: altered copies of each image that still deserve the same label (section 6).


def multiply_adds(config):
    """Multiply-adds of one image's forward pass: patches, blocks and head."""
    patches = (config.image_size // config.patch_size) ** 2
    N, D = patches + 1, config.dim
    block = (4 + 2 * config.mlp_ratio) * N * D**2 + 2 * N**2 * D
    embed = patches * D * config.in_channels * config.patch_size**2
    return int(embed + config.depth * block + D * config.num_classes)


# ---- 6. Data and augmentation -----------------------------------------------------------------------
#
# All images of a set lie in one uint8 tensor on the device that trains; CIFAR-10 takes 184 MB. A batch
# is then an index into it, and augmentation is arithmetic on the whole batch. So there are no worker
# processes to wait for, and one seed fixes the run.
#
# First, how one image file becomes RGB. Files from the world have quirks that a plain decoder passes
# on, and a model cannot know that a cat lies on its side because a camera noted the rotation elsewhere.


def open_image(path, background=(128, 128, 128)):
    """Read an image file into an RGB PIL image of 8 bits a channel, upright.

    The rotation noted in EXIF is applied; what is transparent shows `background` (RGB, 0-255); 16-bit
    grey is scaled to 8 bits; of an animation the first frame is taken, with a note on stderr.
    Raises InputError for what cannot be read as an image.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                frames = getattr(file, "n_frames", 1)
                image = ImageOps.exif_transpose(file)
                image.load()
    except FileNotFoundError:
        raise InputError(f"there is no image {path}; check the path") from None
    except Exception as error:          # decoders meet foreign bytes, and raise all kinds of errors
        raise InputError(f"{path} cannot be read as an image ({error}); "
                         f"open it elsewhere and save it as PNG or JPEG") from None
    if frames > 1:
        print(f"note: {path} is an animation; its first frame is used", file=sys.stderr)
    if image.mode.startswith("I"):      # 16-bit grey; convert() would clip it at 255
        image = image.point(lambda value: value / 257).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    return image.convert("RGB")


def square_of(image):
    """The largest centred square of a PIL image: (left, top, right, bottom) in pixels."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return left, top, left + side, top + side


def fit(image, size):
    """The centred square of a PIL image, resized to (size, size)."""
    if image.size == (size, size):
        return image
    return image.resize((size, size), Image.Resampling.BICUBIC, box=square_of(image))


# Second, a data set that needs no file: `shapes`. A coloured disc or ring at a random place, of a
# random size, on a grey cloudy ground, beside a grey disc or ring that means nothing. The class is
# colour and form together, ten in all. It is learned in minutes, and since we know which pixels carry
# the answer, an attention map can be checked against the truth.

COLOURS = {"red": (220, 50, 50), "green": (50, 180, 70), "blue": (60, 90, 220),
           "yellow": (220, 200, 50), "purple": (170, 60, 190)}
SHAPE_CLASSES = [f"{colour} {form}" for colour in COLOURS for form in ("disc", "ring")]
SHAPE_COUNTS = {"train": 4000, "test": 1000}


def draw_figure(ring, size, generator):
    """Where a disc (or a ring) at a random place falls: (size, size) bool."""
    radius, x, y = torch.rand(3, generator=generator)
    radius = size * (0.14 + 0.12 * radius)
    x, y = radius + x * (size - 2 * radius), radius + y * (size - 2 * radius)
    axis = torch.arange(size) + 0.5                                         # centres of the pixels
    distance = torch.hypot(axis[None, :] - x, axis[:, None] - y)            # (S, S)
    return (distance <= radius) & (distance >= (0.5 * radius if ring else 0))


def make_shapes(n, image_size, seed):
    """Draw n images of coloured shapes; the same seed gives the same pixels.

    Returns images uint8 (n, 3, S, S), labels int64 (n,) that go round the ten classes, and masks bool
    (n, S, S) of the pixels of the coloured figure.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.empty(n, 3, image_size, image_size, dtype=torch.uint8)
    labels = torch.arange(n) % len(SHAPE_CLASSES)
    masks = torch.empty(n, image_size, image_size, dtype=torch.bool)
    colours = torch.tensor(list(COLOURS.values())).float()
    for i in range(n):
        clouds = 80 + 90 * torch.rand(1, 1, 5, 5, generator=generator)
        image = F.interpolate(clouds, size=(image_size, image_size), mode="bilinear",
                              align_corners=True)[0].repeat(3, 1, 1)        # (3, S, S), grey
        ring, grey = torch.rand(2, generator=generator)
        distractor = draw_figure(ring < 0.5, image_size, generator)         # (S, S)
        image[:, distractor] = 40 + 180 * grey
        masks[i] = draw_figure(labels[i] % 2 == 1, image_size, generator)   # on top: never hidden
        image[:, masks[i]] = colours[labels[i] // 2][:, None]
        image += 10 * torch.randn(image.shape, generator=generator)
        images[i] = image.clamp(0, 255)
    return images, labels, masks


# Third, the two halves of a data set, each a sequence of (PIL image, class index). Here the three
# kinds of data meet; from here on they are alike.


def open_split(data, split, image_size):
    """The "train" or "test" half of `data`: a sequence of (PIL image, label), and the class names.

    Raises InputError when the data are missing, damaged or laid out in another way.
    """
    if data == "shapes":
        seed = ("train", "test").index(split)
        images, labels, _ = make_shapes(SHAPE_COUNTS[split], image_size, seed)
        return [(to_pil_image(x), y) for x, y in zip(images, labels.tolist())], SHAPE_CLASSES
    if data == "cifar10":
        try:
            images = CIFAR10("data", train=split == "train", download=True)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"CIFAR-10 could not be fetched or is damaged ({error}); put "
                f"{CIFAR10.filename} (md5 {CIFAR10.tgz_md5}) from {CIFAR10.url} into "
                f"{Path('data').resolve()}, or train without it: --data shapes") from None
        return images, images.classes
    folder = Path(data) / split
    if split == "test" and not folder.is_dir():
        folder = Path(data) / "val"
    if not folder.is_dir():
        raise InputError(f"--data {data} has no folder {split}; give cifar10, shapes, or a folder "
                         f"that holds train/CLASS/* and test/CLASS/* (or val/CLASS/*)")
    try:
        images = ImageFolder(folder, loader=open_image)
    except FileNotFoundError as error:
        raise InputError(f"{error}; each class needs a folder of images in {folder}") from None
    return images, images.classes


def load_split(data, split, image_size):
    """Decode one half into memory: images uint8 (n, 3, S, S), labels int64 (n,), class names."""
    pictures, classes = open_split(data, split, image_size)
    n = len(pictures)
    images = torch.empty(n, 3, image_size, image_size, dtype=torch.uint8)
    labels = torch.empty(n, dtype=torch.int64)
    start = time.perf_counter()
    for i, (picture, label) in enumerate(pictures):
        images[i], labels[i] = pil_to_tensor(fit(picture, image_size)), label
        if i % 500 == 0:
            live(f"reading {split} images: {i:,} of {n:,}")
    say(f"read {n:,} {split} images in {time.perf_counter() - start:.0f} s")
    return images, labels, classes


@dataclass
class Data:
    """A data set on its device. mean and std are those of the training images, in [0, 1]."""
    images: torch.Tensor            # uint8 (n, C, S, S)
    labels: torch.Tensor            # int64 (n,)
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: list                   # K names
    mean: torch.Tensor              # (C, 1, 1)
    std: torch.Tensor               # (C, 1, 1)
    shift: int                      # augmentation: the largest translation, in pixels


def load_data(config, image_size, device):
    """Both halves of config.data as Data. Raises InputError when they cannot be trained on."""
    images, labels, classes = load_split(config.data, "train", image_size)
    test_images, test_labels, test_classes = load_split(config.data, "test", image_size)
    if classes != test_classes:
        odd = sorted(set(classes) ^ set(test_classes))
        raise InputError(f"train and test have different classes: {', '.join(odd[:5])} only on one "
                         f"side; give both the same class folders")
    if len(classes) < 2:
        raise InputError(f"{config.data} has one class, {classes[0]!r}; there is nothing to tell "
                         f"apart, add another class folder")
    if config.batch_size > len(images):
        raise InputError(f"--batch-size {config.batch_size} is more than the {len(images)} training "
                         f"images; make it smaller")
    some = images[::max(1, len(images) // 10_000)].float() / 255    # a folder is sorted by class
    std, mean = torch.std_mean(some, dim=(0, 2, 3), keepdim=True)           # (1, C, 1, 1)
    shift = 0 if config.data == "shapes" else image_size // 8
    return Data(images.to(device), labels.to(device), test_images.to(device),
                test_labels.to(device), classes, mean[0].to(device),
                std[0].clamp(min=0.01).to(device), shift)


# Last, the altered copies. Each alteration is a claim about the data: it says what may change in a
# picture without changing its name.
#
#   - A flip, left to right: a cat seen in a mirror is a cat. (False for text and for some road signs.)
#   - A shift by up to an eighth of the side, 4 pixels of 32: things do not have to be centred. It also
#     moves edges across the borders of patches, which a ViT would otherwise take for fixed. The rim
#     that comes free is filled with 0, which after normalisation is the mean colour. `shapes` lie
#     everywhere already, and a shift could push one out of sight: it is only flipped.
#
# Normalisation, (x - mean) / std by channel, is no augmentation: it gives the network inputs of about
# unit size, whatever the camera. Test images get it too, and nothing else.


def normalise(images, mean, std):
    """uint8 (B, C, H, W) -> float32 (B, C, H, W) with mean about 0 and deviation about 1."""
    return (images.float() / 255 - mean) / std


def augment(images, data):
    """A new version of each image of a batch: uint8 (B, C, H, W) -> float32 (B, C, H, W).

    Shift and flip are one indexing operation: we list, for each image, which row and which column of
    the padded image each of its pixels comes from, and mirror the list of columns for a flip.
    """
    B, C, H, W = images.shape
    s, device = data.shift, images.device
    x = F.pad(normalise(images, data.mean, data.std), (s, s, s, s))         # (B, C, H+2s, W+2s)
    shift = torch.randint(2 * s + 1, (2, B, 1), device=device)
    rows = shift[0] + torch.arange(H, device=device)                        # (B, H)
    cols = shift[1] + torch.arange(W, device=device)                        # (B, W)
    flip = torch.rand(B, 1, device=device) < 0.5
    cols = torch.where(flip, cols.flip(1), cols)                            # (B, W)
    image = torch.arange(B, device=device)[:, None, None, None]
    channel = torch.arange(C, device=device)[:, None, None]
    return x[image, channel, rows[:, None, :, None], cols[:, None, None, :]]


# ---- 7. Optimisation --------------------------------------------------------------------------------
#
# *The learning rate* rises linearly, then falls along half a cosine. It rises first because the first
# gradients are large and point in directions that hold for a few steps only, and because Adam's
# averages rest on few samples then: full steps would throw the weights somewhere they are slow to
# return from. It falls at the end because a constant rate keeps the weights jumping about in the
# valley; small steps let them settle. Cosine spends long at high rates and ends flat, and has nothing
# to tune. It is a pure function of the step, so a resumed run needs no memory of it.


def learning_rate(step, total_steps, warmup_steps, peak, final=0.0):
    """The rate at `step` (from 0): peak is reached at warmup_steps, final at total_steps."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)   # 0 to 1
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


# *Weight decay* pulls weights towards 0, so that only what the data keep asking for stays large. That
# makes sense for matrices, whose size says how strongly they mix. Biases and LayerNorm's scales set
# levels, `cls_token` and `pos_embed` are data rather than maps: for these, 0 is no natural place.
#
# *AdamW* (1711.05101) divides each weight's average gradient by that weight's own typical gradient,
# and decays apart from that. *Muon* (Keller Jordan, 2024; 2502.16982) treats a matrix as a whole: it
# takes the average gradient, a matrix too, and sets all its singular values to about 1, by a few
# matrix products. A gradient is usually dominated by few directions, which are learned over and over;
# with all at equal strength, the rare ones are learned as well. It means something only for matrices
# that map vectors to vectors, so the blocks' weights get Muon and all the rest AdamW.


def parameter_groups(model):
    """Splits all parameters in three: "matrices" of the blocks, other weights to "decay", "rest"."""
    groups = {"matrices": [], "decay": [], "rest": []}
    for name, parameter in model.named_parameters():
        matrix = name.endswith("weight") and parameter.ndim > 1
        kind = "rest" if not matrix else "matrices" if name.startswith("blocks.") else "decay"
        groups[kind].append(parameter)
    return groups


def make_optimizers(model, config):
    """Muon and AdamW, or AdamW alone: a list. Each group remembers its peak rate as "peak"."""
    groups = parameter_groups(model)
    muon = config.optimizer == "muon"
    decayed = groups["decay"] if muon else groups["matrices"] + groups["decay"]
    optimizers = [torch.optim.AdamW([
        {"params": decayed, "weight_decay": config.weight_decay, "peak": config.lr},
        {"params": groups["rest"], "weight_decay": 0.0, "peak": config.lr}])]
    if muon:
        optimizers.append(torch.optim.Muon(
            [{"params": groups["matrices"], "peak": config.muon_lr}],
            weight_decay=config.weight_decay))
    return optimizers


# *Mixed precision.* Matrix products in 16 bits are several times faster where the hardware has units
# for them. Under autocast the weights stay in float32; what goes into a product is rounded on the way.
# bf16 keeps float32's range with fewer digits and needs no further care. fp16 has a small range: the
# small gradients of a ViT would become 0. So the loss is multiplied by a large factor before the
# backward pass and the gradients are divided by it afterwards; a *scaler* looks for the largest factor
# that does not overflow, and skips the steps on which it did.


def pick_device(name):
    """"auto" takes cuda, then mps, then cpu. Raises InputError for a device that is not there."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
               "cpu": True}
    if name == "auto":
        name = next(device for device, there in present.items() if there)
    if not present[name]:
        raise InputError(f"--device {name}: PyTorch sees no such device here; use --device auto")
    return torch.device(name)


def pick_precision(amp, device):
    """The type that matrix products are computed in; "auto" asks the hardware."""
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}
    if amp != "auto":
        return named[amp]
    if device.type == "cuda":
        new = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if new else torch.float16
    if device.type == "cpu":
        can = torch.cpu.get_capabilities()
        return torch.bfloat16 if can.get("amx_bf16") or can.get("avx512_bf16") else torch.float32
    return torch.float32


# *Clipping.* Now and then a batch has a gradient many times longer than usual, and one such step can
# undo a hundred. We measure the length of the gradient of all parameters together and shrink it to
# `clip` if it is longer, its direction kept. Order matters: the scaler's factor must come off first,
# or the limit would be compared with a number 65,536 times too large.
#
# Two optimizers share one scaler, which notes for each whether its own gradients were finite. But the
# norm is over all: one infinite number anywhere makes it infinite, and clipping would carry that into
# the other's healthy gradients. So both step, or neither.


def update(loss, model, optimizers, scaler, clip):
    """One step of all optimizers from `loss` (a scalar); returns the gradient's norm."""
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not scaler.is_enabled() or norm.isfinite():          # only fp16 waits for the device here
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm


# ---- 8. Evaluation, training, checkpoints -----------------------------------------------------------
#
# Two ways to speak to whoever waits: `say` for lines to keep, `live` for one line that rewrites itself,
# on a terminal only (in a log file it would be noise).


def say(text):
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(clear + text, flush=True)


def live(text):
    if sys.stdout.isatty():
        print("\r\033[K" + text[:shutil.get_terminal_size().columns - 1], end="", flush=True)


def duration(seconds):
    """3725 -> "1h 02m", 125 -> "2m 05s"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h {minutes % 60:02}m" if minutes >= 60 else f"{minutes}m {seconds:02}s"


# Evaluation asks one thing: how often is the most probable class the right one, on images that were
# never trained on? Dropout and drop path are off (`eval`), no gradients are kept.


@torch.inference_mode()
def evaluate(model, data, dtype, batch_size=500):
    """Mean cross-entropy (nats) and accuracy (0 to 1) on the test images, as two floats."""
    model.eval()
    total = torch.zeros(2, device=data.test_images.device)                  # loss, right answers
    for images, labels in zip(data.test_images.split(batch_size),
                              data.test_labels.split(batch_size)):
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(normalise(images, data.mean, data.std)).float()  # (B, K)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        total += torch.stack([loss, (logits.argmax(dim=1) == labels).sum()])
    return tuple((total / len(data.test_labels)).tolist())


# A checkpoint holds all that a run needs to go on and all that `viz` needs to rebuild the model:
# tensors and plain Python values, so that it can be read without running code from the file
# (`weights_only=True`). It holds the last epoch's weights. To keep the best epoch's instead would be to
# choose by the test images, and then their accuracy would no longer be that of unseen data.


@contextmanager
def whole_file(path):
    """Write to a temporary file beside `path`, then move it there: the old file or the new one is
    on disk at any moment, never a half. Raises InputError if it cannot be written."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:        # torch.save raises either on a full disk
        raise InputError(f"{path} could not be written ({error}); what was there is "
                         f"untouched, free some space or give another --out") from None
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path, suffix):
    """Raises InputError if no file can be put at `path`, before hours are spent on its content."""
    path = Path(path)
    if path.suffix != suffix or path.is_dir():
        raise InputError(f"--out {path} must be the name of a {suffix} file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"--out {path}: {path.parent} is not a folder that can be written to; "
                         f"make it first, or give another --out")


def draw_curves(history, path):
    """Loss and accuracy by epoch, as a PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    epochs = [row["epoch"] for row in history]
    for axes, what in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        axes.plot(epochs, [row["train_" + what] for row in history], "o-", ms=3,
                  label="training: altered images")
        axes.plot(epochs, [row["test_" + what] for row in history], "o-", ms=3, label="test")
        axes.set(xlabel="epoch", ylabel=what, title=what)
        axes.grid(alpha=0.3)
        axes.legend()
    with whole_file(path) as file:
        figure.savefig(file, format="png")


@dataclass
class Run:
    """What changes while training."""
    model: ViT
    optimizers: list
    scaler: torch.amp.GradScaler
    history: list       # one dict an epoch: the columns of the log


def save_run(run, config, data):
    """Write the checkpoint, the log and the curves: vit.pt, vit.csv, vit.png."""
    out = Path(config.out)
    with whole_file(out) as file:
        torch.save({
            "format": 1,
            "model": run.model.state_dict(),
            "vit": asdict(run.model.config),
            "train": asdict(config),
            "classes": data.classes,
            "mean": data.mean.flatten().tolist(),
            "std": data.std.flatten().tolist(),
            "epoch": len(run.history),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "scaler": run.scaler.state_dict(),
            "history": run.history}, file)
    with whole_file(out.with_suffix(".csv")) as file, open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, run.history[0])
        writer.writeheader()
        writer.writerows(run.history)
    draw_curves(run.history, out.with_suffix(".png"))


def load_checkpoint(path):
    """Read a checkpoint of this program into a dict. Raises InputError if it is none, or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:      # checks sums that torch.load does not
            damaged = archive.testzip()
        if damaged:
            raise InputError(f"{path} is damaged (at {damaged}); use another copy")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["vit"], checkpoint["train"] = (ViTConfig(**checkpoint["vit"]),
                                                  TrainConfig(**checkpoint["train"]))
    except FileNotFoundError:
        raise InputError(f"there is no checkpoint {path}; `python vit.py train` makes one") from None
    except InputError:
        raise
    except Exception as error:          # whatever a foreign file makes of zip, pickle or the keys
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is not a checkpoint of vit.py ({reason})") from None
    return checkpoint


def load_weights(model, state):
    """Load saved weights; names that torch.compile or DataParallel put a prefix on are accepted."""
    prefixes = ("_orig_mod.", "module.")
    for prefix in prefixes:
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    model.load_state_dict(state)


# The live line looks at the loss. On a GPU that means to wait until it is computed, and in the meantime
# nothing new is sent there; so it looks twice a second, not at each step. Whoever looks, checks: once
# the loss is infinite or not a number, all later steps are wasted.


class Progress:
    """Shows how far a run is, and stops it with InputError when the loss is no longer finite."""

    def __init__(self, config, steps, done):
        self.config, self.steps = config, steps                 # steps in one epoch
        self.first = done * steps                               # the step this session began at
        self.start = self.looked = time.perf_counter()

    def look(self, step, loss, rate):
        now, done = time.perf_counter(), step - self.first
        if done == 2:                                           # the first steps are slow: start now
            self.start = now
        pause = 0.5 if sys.stdout.isatty() else 10
        if done != 12 and now - self.looked < pause or done <= 2:
            return
        self.looked = now
        loss = loss.item()                                      # waits for the device
        check_finite(loss, step)
        speed = (done - 2) / (time.perf_counter() - self.start) # steps in a second
        left = (self.config.epochs * self.steps - step) / speed
        if done == 12:
            say(f"about {duration(left)} for {self.config.epochs - self.first // self.steps} "
                f"epochs, and the tests after each")
        live(f"epoch {step // self.steps + 1}/{self.config.epochs}  step "
             f"{step % self.steps + 1}/{self.steps}  loss {loss:.3f}  lr {rate:.1e}  "
             f"{speed * self.config.batch_size:,.0f} images/s  {duration(left)} left")


def check_finite(loss, step):
    if not math.isfinite(loss):
        raise InputError(f"the loss is {loss} at step {step}; training stopped, the last checkpoint "
                         f"is untouched. Try a lower --lr and --muon-lr, or --amp off")


def train_epoch(run, data, config, dtype, progress):
    """One pass over the training images in a new order; the mean loss and accuracy, two floats.

    The random numbers of an epoch depend on the seed and the epoch alone: a run resumed after epoch 3
    draws in epoch 4 what it would have drawn anyway.
    """
    epoch, device = len(run.history), data.images.device
    torch.manual_seed(config.seed + 1_000_003 * (epoch + 1))
    run.model.train()
    B = config.batch_size
    order = torch.randperm(len(data.images), device=device)
    steps = len(order) // B             # the few images that fill no batch wait for another epoch
    total_steps = config.epochs * steps
    total = torch.zeros(2, device=device)
    for i in range(steps):
        step = epoch * steps + i
        for group in (g for optimizer in run.optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(step, total_steps, round(config.warmup * total_steps),
                                        group["peak"])
        batch = order[i * B:(i + 1) * B]                                    # (B,)
        images, labels = augment(data.images[batch], data), data.labels[batch]
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = run.model(images)                                      # (B, K)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        update(loss, run.model, run.optimizers, run.scaler, config.clip)
        right = (logits.argmax(dim=1) == labels).float().mean()
        total += torch.stack([loss.detach(), right])
        progress.look(step, loss.detach(), group["lr"])
    loss, accuracy = (total / steps).tolist()
    check_finite(loss, step)
    return loss, accuracy


# The loss is the cross-entropy against a softened target: 0.9 for the right class and 0.1 spread over
# all (label smoothing). Against a hard target the model is never done: it can always lower the loss
# by driving the logits of what it knows further apart. The softened one says when to stop.
#
# Do not compare the loss in training with that of the test: it is on altered images, has the smoothing
# in it, and is a mean over an epoch in which the model changed. The log's heading says so too.


def train(config, vit_config, checkpoint=None):
    """Train, and write a checkpoint after each epoch; returns the Run."""
    device = pick_device(config.device)
    dtype = pick_precision(config.amp, device)
    data = load_data(config, vit_config.image_size, device)
    torch.manual_seed(config.seed)
    model = ViT(replace(vit_config, num_classes=len(data.classes))).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(model, make_optimizers(model, config), scaler, [])
    if checkpoint:
        restore(run, data, checkpoint)
    elif Path(config.out).exists():
        old = Path(config.out).with_suffix(".old.pt")
        os.replace(config.out, old)
        say(f"{config.out} is from an earlier run; it is now {old}")
    steps = len(data.images) // config.batch_size
    announce(run, data, config, steps, device, dtype)
    progress = Progress(config, steps, len(run.history))
    while len(run.history) < config.epochs:
        start = time.perf_counter()
        loss, accuracy = train_epoch(run, data, config, dtype, progress)
        trained = time.perf_counter()
        test_loss, test_accuracy = evaluate(model, data, dtype)
        run.history.append({
            "epoch": len(run.history) + 1,
            "train_loss": loss, "train_accuracy": accuracy,
            "test_loss": test_loss, "test_accuracy": test_accuracy,
            "images_per_second": steps * config.batch_size / (trained - start),
            "seconds": time.perf_counter() - start})
        save_run(run, config, data)
        row = run.history[-1]
        say(f"{row['epoch']:5}  {loss:10.4f}  {accuracy:9.2%}  {test_loss:9.4f}  {test_accuracy:8.2%}"
            f"  {row['images_per_second']:8,.0f}  {duration(row['seconds']):>7}")
    return run


def restore(run, data, checkpoint):
    """Put a checkpoint's state into a new Run. Raises InputError if the data are not the same."""
    same = (checkpoint["classes"] == data.classes
            and torch.allclose(torch.tensor(checkpoint["mean"]), data.mean.flatten().cpu()))
    if not same:
        raise InputError("these are not the images that the checkpoint was trained on; give the "
                         "same --data, or start a new run without --resume")
    load_weights(run.model, checkpoint["model"])
    for optimizer, state in zip(run.optimizers, checkpoint["optimizers"]):
        optimizer.load_state_dict(state)
    run.scaler.load_state_dict(checkpoint["scaler"])
    run.history = checkpoint["history"]


def announce(run, data, config, steps, device, dtype):
    """Say what is about to happen, and what the columns of the log mean."""
    vit = run.model.config
    count = sum(parameter.numel() for parameter in run.model.parameters())
    tokens = run.model.pos_embed.shape[1]
    if tokens <= 16:
        say(f"warning: patches of {vit.patch_size} leave {tokens - 1} tokens of a {vit.image_size} "
            f"pixel image, too few to attend to; a smaller --patch-size will learn better")
    say(f"model   {vit.depth} blocks, {vit.num_heads} heads, width {vit.dim}, {tokens} tokens: "
        f"{count:,} parameters, {multiply_adds(vit) / 1e9:.2f} G multiply-adds an image")
    say(f"data    {config.data}: {len(data.images):,} training and {len(data.test_images):,} test "
        f"images, {len(data.classes)} classes, {vit.image_size} x {vit.image_size} pixels")
    say(f"run     {config.epochs} epochs of {steps} steps of {config.batch_size} images, "
        f"{config.optimizer}, seed {config.seed}, on {device}, {str(dtype).removeprefix('torch.')}")
    say("\n       on altered images, while learning |  on test images, after it")
    say("epoch  train loss  train acc  test loss  test acc  images/s     time")


# ---- 9. Seeing: attention, rollout, the picture ------------------------------------------------------
#
# Where did the model look? Three answers of growing care. Each takes the weights of section 3, one
# (B, h, N, N) for each block, and gives one number for each patch. Token 0 is the class token, so
# row 0 is what it took, and columns 1 and up are the patches.
#
# *CLS attention* is row 0 of one block, A_l[k, 0, 1:] for head k. It says what the class token read in
# that block: but what it read are tokens that have themselves read others since block 1.
#
# *Rollout* (Abnar and Zuidema, 2005.00928) follows that. Half of what leaves a block came through the
# residual and half through attention, it assumes, so a block mixes tokens by
#
#     A'_l = 1/2 mean over heads of A_l  +  1/2 I,         R = A'_L ... A'_2 A'_1
#
# with later blocks on the left, as matrices act on columns. Each row of R sums to 1: it says from which
# input tokens an output token is made. It forgets values, MLPs and what the head reads, and is the
# same for all classes.


def rollout_matrix(attention):
    """attention: L tensors (B, h, N, N), block 1 first; returns R (B, N, N), rows sum to 1."""
    R = identity = torch.eye(attention[0].shape[-1], device=attention[0].device)
    for A in attention:
        R = (A.mean(dim=1) + identity) / 2 @ R                  # (B, N, N)
    return R


def attention_rollout(attention):
    """The class token's row of the rollout, its patches: (B, N-1)."""
    return rollout_matrix(attention)[:, 0, 1:]


# *Relevance* (Chefer, Gur and Wolf, 2103.15679) asks about one class c. The gradient of its logit y_c
# with respect to a weight says whether more attention there would raise the logit. Gradient times
# weight, the negative part cut off, is the evidence that flowed there; the mean over heads comes after
# the cut, so that a head that speaks against the class cannot silence one that speaks for it:
#
#     A'_l = mean over heads of max(0, dy_c/dA_l * A_l),     R = I,  then  R <- R + A'_l R  for l = 1..L
#
# The added R is the residual. Rows are not normalised. It is the only one of the three that can tell
# classes apart; what it cannot see is evidence against a class, and whatever passes through the MLPs.


def relevance_matrix(attention, gradients):
    """Two lists of L tensors (B, h, N, N), block 1 first; returns R (B, N, N)."""
    R = torch.eye(attention[0].shape[-1], device=attention[0].device)
    for A, gradient in zip(attention, gradients, strict=True):
        R = R + (gradient * A).clamp(min=0).mean(dim=1) @ R     # (B, N, N)
    return R


def relevance(model, images, target):
    """Relevance of each patch for a class.

    images (B, C, H, W), normalised; target a class index, or (B,) of them. Returns (B, N-1) float32,
    not normalised. The model is left in the mode it was in.
    """
    training = model.training
    model.eval()
    images = images.float().requires_grad_()            # so that weights have gradients even if frozen
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        logits, attention = model(images, return_attention=True)
    target = torch.as_tensor(target, device=images.device).expand(len(images))
    chosen = logits.gather(1, target[:, None]).sum()    # images do not mix, so the sum splits again
    gradients = torch.autograd.grad(chosen, attention)
    model.train(training)
    return relevance_matrix([A.detach() for A in attention], gradients)[:, 0, 1:]


# To compare maps they are drawn as multiples of uniform: scaled to a mean of 1 over the patches. 1 then
# means "no preference", 5 "five times its share".


def times_uniform(map):
    """Scale (..., N-1) to a mean of 1 over the patches; a map that is all zero stays zero."""
    mean = map.mean(dim=-1, keepdim=True)
    return map / mean.where(mean > 0, torch.ones_like(mean))


# The picture has two parts. A, the answer: the photograph, what the model got of it, what it says, and
# the three maps. B, the evidence: what the class token read in each block and head. Maps are drawn
# patch by patch, without smoothing: the model knows nothing finer.

MAP_STYLE = {"cmap": "viridis", "interpolation": "nearest", "vmin": 0}


def show_map(axes, values, view, grid, top, alpha):
    """Lay a map (N-1,) over the model's view, an RGB PIL image; returns what a colour bar needs."""
    extent = (0, view.width, view.height, 0)
    axes.imshow(view.convert("L"), cmap="gray", extent=extent)
    axes.set(xticks=[], yticks=[])
    return axes.imshow(values.reshape(grid), extent=extent, vmax=top, alpha=alpha, **MAP_STYLE)


def draw_answer(figure, photo, view, probabilities, classes, maps, model):
    """Part A, in two rows of three. maps: {title: (N-1,)}, as multiples of uniform."""
    cells = figure.add_gridspec(2, 3, left=0.02, right=0.6, top=0.86, bottom=0.12, hspace=0.22).subplots()
    cells[0, 0].imshow(photo)
    left, upper, right, lower = square_of(photo)
    cells[0, 0].add_patch(Rectangle((left, upper), right - left - 1, lower - upper - 1, fill=False,
                                    color="crimson", lw=2))
    cells[0, 0].set(title=f"the image, {photo.width} x {photo.height}", xticks=[], yticks=[])
    cells[0, 1].imshow(view, extent=(0, view.width, view.height, 0))
    lines = range(0, view.width + 1, model.config.patch_size)
    cells[0, 1].set(title=f"what the model sees: {len(lines) - 1} x {len(lines) - 1} patches",
                    xticks=lines, yticks=lines)
    cells[0, 1].tick_params(length=0, labelbottom=False, labelleft=False)
    cells[0, 1].grid(color="white", lw=0.6)
    best = probabilities.topk(min(5, len(classes)))
    names = [classes[i] for i in best.indices]
    bars = cells[0, 2].barh(range(len(names)), best.values, color="tab:blue", height=0.4)
    cells[0, 2].bar_label(bars, [f"{p:.1%}" for p in best.values.tolist()], padding=3)
    for i, name in enumerate(names):
        cells[0, 2].text(0, i - 0.28, name[:40], va="bottom")
    cells[0, 2].set(title="what it says", xlim=(0, 1.18), xticks=[], yticks=[])
    cells[0, 2].set_ylim(len(names) - 0.5, -0.75)
    cells[0, 2].spines[:].set_visible(False)
    shared = max(float(values.max()) for values in list(maps.values())[:2])
    for axes, (title, values) in zip(cells[1], maps.items()):
        top = shared if not title.startswith("relevance") else float(values.max())
        image = show_map(axes, values, view, model.grid, max(top, 1), alpha=0.6)
        axes.set_title(title)
        figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="x uniform")


def draw_evidence(figure, attention, view, grid):
    """Part B: L rows of h maps. attention: L tensors (h, N-1), as multiples of uniform."""
    depth, heads = len(attention), len(attention[0])
    cells = figure.add_gridspec(depth, heads, left=0.68, right=0.94, top=0.86, bottom=0.12, wspace=0.06,
                                hspace=0.06).subplots(squeeze=False)
    top = max(float(maps.max()) for maps in attention)
    size = max(4, min(11, 80 / depth, 60 / heads))
    for l, k in ((l, k) for l in range(depth) for k in range(heads)):
        image = show_map(cells[l, k], attention[l][k], view, grid, top, alpha=1)
        if l == 0:
            cells[l, k].set_title(f"head {k + 1}", fontsize=size)
        if k == 0:
            cells[l, k].set_ylabel(f"block {l + 1}", fontsize=size)
    bar = figure.add_axes((0.955, 0.12, 0.008, 0.74))
    figure.colorbar(image, cax=bar, label="x uniform")


CAPTION = ("1 x uniform: no preference. Attention shows where information flowed; it is no proof of why "
           "the model answered as it did (Jain and Wallace, 1902.10186).")


def draw_picture(path, photo, view, model, mean, std, classes):
    """Look at one image and write the picture. photo: RGB PIL image; view: the same, fitted."""
    images = normalise(pil_to_tensor(view)[None], mean, std)                # (1, C, S, S)
    with torch.inference_mode():
        logits, attention = model(images, return_attention=True)
    probabilities = logits[0].softmax(dim=0)                                # (K,)
    c = int(probabilities.argmax())
    maps = {f"CLS attention, block {len(attention)}, mean of heads": attention[-1].mean(dim=1)[0, 0, 1:],
            f"rollout, blocks 1 to {len(attention)}": attention_rollout(attention)[0],
            f"relevance for {classes[c]} ({probabilities[c]:.0%})": relevance(model, images, c)[0]}
    maps = {title: times_uniform(values) for title, values in maps.items()}
    figure = Figure(figsize=(16, 9), dpi=100)
    draw_answer(figure, photo, view, probabilities, classes, maps, model)
    draw_evidence(figure, [times_uniform(A[0, :, 0, 1:]) for A in attention], view, model.grid)
    figure.text(0.02, 0.94, "A   The answer", fontsize=17, weight="bold")
    figure.text(0.655, 0.94, "B   The evidence: CLS attention, all blocks and heads", fontsize=17,
                weight="bold")
    figure.text(0.02, 0.04, CAPTION, fontsize=11)
    with whole_file(path) as file:
        figure.savefig(file, format="png")


# ---- 10. The command line ---------------------------------------------------------------------------
#
# The options are the fields of the two configurations. argparse leaves out what was not typed
# (SUPPRESS), so a default never hides a value that a checkpoint or a variant has.


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message}; see {self.prog} --help")


def add_options(parser, config_class, groups):
    for f in fields(config_class):
        if "help" not in f.metadata:
            continue
        default = f" (default: {f.default})" if f.default != "" else ""
        groups[f.metadata["group"]].add_argument(
            "--" + f.name.replace("_", "-"), type=f.type, choices=f.metadata["choices"],
            default=argparse.SUPPRESS, metavar=None if f.metadata["choices"] else f.type.__name__.upper(),
            help=f.metadata["help"].replace("%", "%%") + default)


def make_parser():
    parser = Parser(prog="vit.py", allow_abbrev=False,
                    description="Train a Vision Transformer and see what it looks at.")
    parser.add_argument("--version", action="version", version=f"vit.py {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="train | viz")
    t = commands.add_parser("train", help="train a model", allow_abbrev=False,
                            description="Train a model; write a checkpoint after each epoch.")
    groups = {name: t.add_argument_group(name) for name in ("data", "model", "optimisation", "run")}
    groups["model"].add_argument("--variant", choices=VARIANTS, default=argparse.SUPPRESS,
                                 help="a named size: sets dim, depth and num-heads, nothing else")
    add_options(t, ViTConfig, groups)
    add_options(t, TrainConfig, groups)
    v = commands.add_parser("viz", help="draw what a model looked at", allow_abbrev=False,
                            description="Draw what a trained model looked at in an image.")
    v.add_argument("--ckpt", required=True, metavar="FILE", help="a checkpoint that train wrote")
    v.add_argument("--image", required=True, nargs="+", metavar="IMAGE",
                   help="image files; test:7 is the eighth test image of the model's data")
    v.add_argument("--out", metavar="FILE",
                   help="the picture, for a single image (default: IMAGE_attention.png, here)")
    return parser


# A resumed run is the same run: its length may grow, its files may move. All else is in the checkpoint.

RESUME_MAY_CHANGE = ("resume", "out", "epochs", "data", "device")


def run_train(typed):
    checkpoint = None
    shape = VARIANTS.get(typed.pop("variant", None), ())
    model_names = {f.name for f in fields(ViTConfig)}
    vit = dict(zip(("dim", "depth", "num_heads"), shape))
    vit |= {name: value for name, value in typed.items() if name in model_names}
    run = {name: value for name, value in typed.items() if name not in model_names}
    if typed.get("resume"):
        checkpoint = load_checkpoint(typed["resume"])
        before = asdict(checkpoint["vit"]) | asdict(checkpoint["train"])
        clash = [f"--{name.replace('_', '-')} (was {before[name]})" for name, value in
                 (vit | run).items() if value != before[name] and name not in RESUME_MAY_CHANGE]
        if clash:
            raise InputError(f"--resume goes on with the same run, but this would change "
                             f"{', '.join(clash)}; leave it out, or start a new run")
        vit = asdict(checkpoint["vit"])
        run = asdict(checkpoint["train"]) | {"out": typed["resume"]} | run
    config, vit_config = TrainConfig(**run), ViTConfig(**vit)
    check_output(config.out, ".pt")
    if checkpoint and config.epochs <= checkpoint["epoch"]:
        raise InputError(f"{typed['resume']} has had its {checkpoint['epoch']} epochs; to go on, give "
                         f"more with --epochs")
    try:
        run = train(config, vit_config, checkpoint)
    except KeyboardInterrupt:
        there = Path(config.out).exists()
        say(f"stopped; to go on: python vit.py train --resume {config.out}" if there else
            "stopped before the first epoch was done; nothing was saved")
        return 130
    say(f"test accuracy {run.history[-1]['test_accuracy']:.2%} after {config.epochs} epochs; wrote "
        f"{config.out}, its log (.csv) and curves (.png)\n"
        f"see what it looks at: python vit.py viz --ckpt {config.out} --image test:0")
    return 0


def read_picture(name, checkpoint):
    """An image file, or "test:7" of the checkpoint's data, as an RGB PIL image."""
    if not name.startswith("test:"):
        mean = tuple(round(255 * value) for value in checkpoint["mean"])
        return open_image(name, background=mean)
    size = checkpoint["vit"].image_size
    images, classes = open_split(checkpoint["train"].data, "test", size)
    index = name.removeprefix("test:")
    if not index.isdecimal() or int(index) >= len(images):
        raise InputError(f"--image {name}: give test:0 to test:{len(images) - 1}")
    return images[int(index)][0]


def run_viz(typed):
    checkpoint = load_checkpoint(typed["ckpt"])
    model = ViT(checkpoint["vit"]).eval()
    load_weights(model, checkpoint["model"])
    mean, std = (torch.tensor(checkpoint[name])[:, None, None] for name in ("mean", "std"))
    if typed["out"] and len(typed["image"]) > 1:
        raise InputError("--out names one picture; leave it out to draw several images")
    for name in typed["image"]:
        out = typed["out"] or Path(name.replace(":", "_")).stem + "_attention.png"
        check_output(out, ".png")
        photo = read_picture(name, checkpoint)
        size = model.config.image_size
        if min(photo.size) < size:
            print(f"warning: {name} is smaller than the {size} pixels the model sees; it is enlarged",
                  file=sys.stderr)
        draw_picture(out, photo, fit(photo, size), model, mean, std, checkpoint["classes"])
        say(f"wrote {out}")
    return 0


def main(argv=None):
    """Run the command line `argv` (default: sys.argv); returns the exit code."""
    try:
        typed = vars(make_parser().parse_args(argv))
        command = typed.pop("command")
        return {"train": run_train, "viz": run_viz}[command](typed)
    except InputError as error:
        live("")
        print(f"vit.py: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:               # --help and --version end this way
        return end.code


if __name__ == "__main__":
    sys.exit(main())
