"""vit.py: the Vision Transformer in one file, to be read from top to bottom, and to be run.

The idea in six steps, after Dosovitskiy et al., "An Image is Worth 16x16 Words" (2010.11929):

  1. Cut the image into square patches and turn each into a vector: a token.         Section 2
  2. Let every token gather what it needs from all the others: attention.            Section 3
  3. Let every token think about what it gathered: an MLP. Both together: a block.   Section 4
  4. Add one token that belongs to no patch, tell every token where it lies, stack
     blocks, and let a linear layer read the class from that one token.              Section 5
  5. Show it labelled images, each time a little altered, and lower its loss.    Sections 6-8
  6. Ask it where it looked.                                                         Section 9

Commands (each has --help):

  python vit.py train --data shapes --epochs 5       nothing to download, minutes on a laptop
  python vit.py train --epochs 100                   CIFAR-10, the default model and recipe
  python vit.py train --resume vit.pt                continue a stopped run
  python vit.py eval --ckpt vit.pt                   test it, class by class
  python vit.py viz --ckpt vit.pt --image cat.png    what did it look at?

Measured: test accuracy after the last epoch, seed 0, on a Xeon, in bf16 (section 7).

  98.4 %   python vit.py train --data shapes --epochs 5     2 minutes, two cores
  81.6 %   python vit.py train --data DIR --epochs 12      94 minutes, one core; CIFAR-10 as JPEG
  84.7 %   python vit.py train --data DIR --epochs 25     141 minutes, one core; the same files

Left out, to stay readable: several devices, worker processes, pre-trained weights, distillation,
convolutional stems and other architectures. This is the plain ViT. Where the model departs from the
paper, a comment begins with "paper:"; the recipe that trains it is a later one throughout.

Contents:  1. Symbols and configuration    6. Data and augmentation
           2. Patches                      7. Optimisation
           3. Attention                    8. Evaluation, checkpoints, training
           4. MLP, drop path, block        9. Seeing: attention, rollout, relevance
           5. The Vision Transformer      10. The command line
"""

# ---- 1. Symbols and configuration ----------------------------------------------------------------
#
# These letters mean the same in every shape and formula of this file:
#
#   B  images in a batch             N  tokens: the class token and the patches, 1 + (H/P)(W/P)
#   C  channels of an image          D  width: how many numbers a token has (`dim`)
#   H  height of an image, pixels    h  attention heads in a block (`num_heads`)
#   W  width of an image, pixels     d  width of one head, D / h
#   S  side of a square image        L  blocks (`depth`)
#   P  side of a patch, pixels       K  classes
#   n  images in a data set          l  a block, 1 to L
#
# paper: its N counts the patches only.

import argparse, csv, itertools, math, os, pickle, shlex, sys, tempfile, time, warnings, zipfile
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import nn
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

__version__ = "0.1.0"


class InputError(ValueError):
    """Something the user gave cannot work. The message says what, and what to do about it."""


# The options, with their defaults. On a first reading skim them: what needs a reason has it where
# it is used.

def option(default, help, low=None, high=None, choices=None):
    """A field of a configuration. `help` is the comment you read here and the text of --help."""
    return field(default=default, metadata=dict(help=help, low=low, high=high, choices=choices))


class Config:
    """Checks every field's type, choices and range. Raises InputError."""

    def __post_init__(self):
        for f in fields(self):
            name, value = f"--{f.name.replace('_', '-')}", getattr(self, f.name)
            low, high, choices = (f.metadata.get(key) for key in ("low", "high", "choices"))
            if type(value) not in ((int, float) if f.type is float else (f.type,)):
                raise InputError(f"{name} must be of type {f.type.__name__}, not {value!r}")
            if choices and value not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
            if low is not None and not low <= value <= high:            # a NaN fails this too
                raise InputError(f"{name} must lie between {low} and {high}, not {value}")


@dataclass(frozen=True)
class ViTConfig(Config):
    """What the model is. Raises InputError when the numbers do not fit together."""
    image_size: int = option(32, "side of the square images, in pixels", 1, 4096)
    patch_size: int = option(4, "side P of a patch, in pixels", 1, 4096)
    in_channels: int = 3        # no option: every image is read as RGB
    num_classes: int = 10       # no option: the data say
    dim: int = option(192, "width D of a token", 1, 16384)
    depth: int = option(6, "number L of blocks", 1, 256)
    num_heads: int = option(3, "attention heads h in a block", 1, 256)
    mlp_ratio: float = option(4.0, "hidden width of the MLP, over dim", 0.1, 64)
    dropout: float = option(0.0, "share of numbers set to 0 in training", 0, 0.99)
    drop_path: float = option(0.0, "share of branches dropped, rising from 0 to this", 0, 0.99)

    def __post_init__(self):
        super().__post_init__()
        if self.image_size % self.patch_size:
            raise InputError(f"--image-size {self.image_size} cannot be cut into patches of "
                             f"--patch-size {self.patch_size}; make it a multiple")
        if self.dim % self.num_heads:
            raise InputError(f"--dim {self.dim} cannot be shared among --num-heads "
                             f"{self.num_heads}; make it a multiple")
        if self.dim * self.mlp_ratio < 1:
            raise InputError(f"--mlp-ratio {self.mlp_ratio} leaves nothing of --dim {self.dim}; "
                             f"make it larger")


@dataclass(frozen=True)
class TrainConfig(Config):
    """How it is trained. Raises InputError when a value is out of its range."""
    data: str = option("cifar10", "cifar10, shapes (built in), or a folder that holds "
                       "train/CLASS/* and test/CLASS/* (or val/CLASS/*)")
    model: str = option("vit", "vit, or resnet18: a CNN to compare it with (of the model's "
                        "options it heeds --image-size only)", choices=("vit", "resnet18"))
    epochs: int = option(100, "passes over the training images", 1, 100_000)
    batch_size: int = option(128, "images in a step", 1, 65_536)
    optimizer: str = option("muon", "muon for the matrices of the blocks and adamw for the rest, "
                            "or adamw for all", choices=("muon", "adamw"))
    muon_lr: float = option(0.006, "peak learning rate of Muon", 0, 100)
    lr: float = option(1e-3, "peak learning rate of AdamW", 0, 100)
    weight_decay: float = option(0.05, "pull of the matrices to 0", 0, 100)
    warmup: float = option(0.1, "share of the run with a rising rate", 0, 0.9)
    label_smoothing: float = option(0.1, "share of a target spread over all classes", 0, 0.99)
    clip: float = option(1.0, "largest length of the gradient", 1e-6, 1e6)
    out: str = option("vit.pt", "checkpoint; log (.csv) and curves (.png) go beside it")
    resume: str = option("", "a checkpoint whose run is to go on; its settings are kept")
    device: str = option("auto", "auto takes cuda, then mps, then cpu",
                         choices=("auto", "cuda", "mps", "cpu"))
    amp: str = option("auto", "precision of matrix products; auto: bf16 on CUDA and x86 that have "
                      "it, fp16 on older CUDA", choices=("auto", "bf16", "fp16", "off"))
    compile: bool = option(False, "have torch.compile build faster code first (worth it on a GPU)")
    seed: int = option(0, "fixes all that is random", 0, 2**31 - 1)


# ---- 2. Patches: an image becomes tokens ---------------------------------------------------------
#
# A Transformer reads a list of vectors, its tokens. The obvious list is the pixels, but attention
# compares every token with every token, N x N pairs: a 224 x 224 image has 50,176 pixels, so 2.5
# billion pairs, again in every layer. Cut into patches of 16 x 16 it has 196 tokens and 38
# thousand pairs. For CIFAR-10 (32 x 32) the same thought gives patches of 4: 8 x 8 = 64 tokens.
# Patches of 16 would leave four, and attention next to nothing to choose between.
#
# A patch of P x P pixels and C channels is laid out as one row p_i, channel by channel, and one
# learned matrix E maps it to D numbers, a token:
#
#     p_i E + b,      p_i in R^(C*P*P),  E in R^(C*P*P x D)               (paper, eq. 1, without b)
#
# Below, E is written as a convolution whose kernel and stride are both P. It is the same sum: a
# kernel is a column of E folded to (C, P, P), and a stride of P lays it on every patch once,
# without overlap. It saves us the cutting; test_vit.py cuts by hand and finds the same numbers.

class PatchEmbed(nn.Module):
    """Image to tokens, patches left to right and top to bottom: (B, C, H, W) -> (B, N-1, D)."""

    def __init__(self, config):
        super().__init__()
        P = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.dim, kernel_size=P, stride=P)

    def forward(self, images):
        x = self.proj(images)                                   # (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2)                     # (B, N-1, D)


# ---- 3. Attention --------------------------------------------------------------------------------
#
# A token on a cat's ear should find out that there is another ear. So every token asks a question,
# its query q_i. Every token also offers an answer, its value v_j, under a heading, its key k_j. All
# three are linear maps of the token (in the code with a bias each). With one token a row, x has the
# shape (N, D), and so:
#
#     q = x W_q,   k = x W_k,   v = x W_v                                        (paper, eq. 5)
#
# How well heading j fits question i is a dot product. A softmax turns the scores of one query into
# weights that sum to 1, and the token receives the weighted mean of the values:
#
#     A = softmax( q k^T / sqrt(d) ),      output = A v                               (eq. 6, 7)
#
# Over which axis? Over the keys, the last: row i of A says how token i shares out its attention.
#
# Why sqrt(d), if a query has d numbers? If the numbers in q and k are independent, of mean 0 and
# variance 1, the sum of d products has variance d: scores of size 8 for d = 64. The softmax of such
# scores is close to 0 or 1, where its gradient is close to 0, and learning is slow.
#
# By hand, one query and three tokens, d = 4:
#
#     q = (1, 1, 1, 1)     k_1 = (0, 0, 0, 0)    k_2 = (2, 0, 0, 0)    k_3 = (2, 2, 0, 0)
#                          v_1 = (1, 0, 0, 0)    v_2 = (0, 1, 0, 0)    v_3 = (0, 0, 1, 0)
#     q.k = 0, 2, 4        over sqrt(4): 0, 1, 2      exp: 1, 2.718, 7.389, in all 11.107
#     A = .090, .245, .665                            output = (.090, .245, .665, 0)
#
# Without the division the weights would be .016, .117, .867: closer to choosing a single token.
#
# Why several heads? One softmax gives one mean: it can look at the left ear and at the tail, but
# mixes what it finds. So q, k and v are cut into h pieces of d = D / h numbers, each with a softmax
# of its own, and `proj` mixes what they found (eq. 8). This takes no more multiplications than one
# head of width D.
#
# Nothing here knows where a token lies: shuffle the tokens, and the outputs are shuffled likewise.
#
# Dropout sets a random share of numbers to 0 in training and scales up the rest, so that nothing
# hangs on a single one.
# paper: no dropout on the weights of attention; here there is.

class Attention(nn.Module):
    """Multi-head self-attention: (B, N, D) -> (B, N, D), and its weights (B, h, N, N)."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)        # three maps in one matrix product
        self.proj = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, return_attention=False, fused=None):
        """Returns the output and the softmax weights, before dropout; None from the fused kernel.

        That does all steps in one and never stores the N x N weights, so it cannot return them. By
        default it is used on CUDA, where it is much faster, when they are not asked for.
        """
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)  # (B, N, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # each (B, h, N, d)
        if fused is None:
            fused = x.is_cuda and not return_attention
        if fused:
            drop = self.dropout.p if self.training else 0.0
            attention = None
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)         # (B, h, N, d)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])   # (B, h, N, N)
            attention = scores.softmax(dim=-1)                          # (B, h, N, N)
            x = self.dropout(attention) @ v                             # (B, h, N, d)
        x = x.transpose(1, 2).reshape(B, N, D)                  # (B, N, D), heads side by side
        return self.dropout(self.proj(x)), attention


# ---- 4. MLP, drop path, block --------------------------------------------------------------------
#
# Attention moves information between tokens, but for given weights A it is linear: a token can mix
# "pointed" and "furry", not decide that both are there. The MLP does that half of the work. It
# takes each token alone, all with the same weights: widen to four times D, to have many features
# to test for, bend each by a non-linear function, narrow again. Two thirds of a block's weights
# are here.
#
#     MLP(x) = fc2(GELU(fc1(x))),      GELU(t) = t Phi(t),  Phi(t): share of a normal below t
#
# GELU is a ReLU with a rounded corner: it passes large t and stops very negative t, but does not
# cut the gradient off at once below 0.

class MLP(nn.Module):
    """The same two linear layers for every token: (B, N, D) -> (B, N, D)."""

    def __init__(self, config):
        super().__init__()
        hidden = int(config.dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.dim, hidden)
        self.fc2 = nn.Linear(hidden, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.dropout(F.gelu(self.fc1(x)))                   # (B, N, mlp_ratio * D)
        return self.dropout(self.fc2(x))                        # (B, N, D)


# LayerNorm brings the D numbers of each token to mean 0 and variance 1, then scales and shifts them
# by learned numbers. A block adds what attention and MLP find to what is there already (eq. 2, 3):
#
#     x <- x + attention(norm1(x)),      x <- x + mlp(norm2(x))
#
# Each plus is a residual connection: a branch need only learn a correction, and on the way back the
# gradient reaches every block undamped.
#
# The sum grows with every block; LayerNorm gives each branch numbers of one size. It stands before
# the branch (pre-norm). After the sum, as in the first Transformer, it would rescale the gradient
# on the direct path in every block; such models train only with great care at the start.
#
# Drop path (stochastic depth, 1603.09382) leaves a branch out for some images of a batch while
# training, so that no block relies on exactly what another does. The branches that stay are scaled
# up by 1 / (1 - rate): on average the sum is what it will be when nothing is dropped. The rate
# rises from 0 in the first block to `drop_path` in the last: all others build on the early blocks.
# paper: it has dropout only; drop path came to ViT with DeiT (2012.12877).

class DropPath(nn.Module):
    """Zero a branch for a random share `rate` of the images: (B, N, D) -> (B, N, D)."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0:
            return x
        keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)  # (B, 1, 1), each 0 or 1
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """One pre-norm block: (B, N, D) -> (B, N, D), and its attention weights."""

    def __init__(self, config, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)         # eps: no division by 0
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config)
        self.drop_path = DropPath(drop_path)

    def forward(self, x, return_attention=False):
        out, attention = self.attn(self.norm1(x), return_attention)
        x = x + self.drop_path(out)                             # (B, N, D)
        x = x + self.drop_path(self.mlp(self.norm2(x)))         # (B, N, D)
        return x, attention


# ---- 5. The Vision Transformer -------------------------------------------------------------------
#
# Three things surround the blocks: a class token, positions, and a last norm.
#
# The class token. L blocks give N tokens, but we want one answer. So one more token, a learned
# vector that is the same for every image, is put in front. In each block it gathers from the
# patches what helps to name the class. At the end the head, a linear layer (unrelated to the heads
# of attention), reads it alone and gives K scores, the logits, whose softmax is the probabilities.
# The mean of the patch tokens would do about as well; but then no single row of attention would say
# what the answer was gathered from, and that row is what section 9 draws.
#
# The positions. To attention and MLP the tokens are a heap, not a grid: a cat with its ears below
# its feet would be the same cat. So each place has a vector of its own, learned like any weight,
# which is added to the token that lies there:
#
#     x = [cls; p_1 E + b; ...; p_(N-1) E + b] + E_pos,      E_pos in R^(N x D)           (eq. 1)
#
# They begin as waves along the rows and the columns: from the first step on, near places have like
# vectors. These are halved, to leave more room for what the patches say.
# paper: they begin at random, and the grid must be discovered.

def sincos_positions(rows, cols, dim):
    """Position vectors: sin and cos of the row, of the column, each in a quarter of the width.

    Returns (rows * cols, dim) float32 in [-1, 1]; what is left over (dim % 4) is 0. Frequencies
    fall from 1 towards 1/100. ("Attention Is All You Need", 1706.03762, section 3.5, goes to
    1/10,000, for long texts. Along the few places of an image such waves would hardly change.)
    """
    frequency = 100 ** -(torch.arange(dim // 4) / max(1, dim // 4))      # (dim//4,)
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    row = row.reshape(-1, 1) * frequency                                    # (rows*cols, dim//4)
    col = col.reshape(-1, 1) * frequency                                    # (rows*cols, dim//4)
    table = torch.cat([row.sin(), row.cos(), col.sin(), col.cos()], dim=1)  # dim - dim % 4 wide
    return F.pad(table, (0, dim % 4))                                       # (rows*cols, dim)


# The last norm. In a pre-norm model the sum of all branches is never normalised on its way, so one
# more LayerNorm stands before the head (eq. 4).
#
# How the weights begin. A matrix that adds up m inputs: normal numbers of deviation 1 / sqrt(m).
# From inputs of variance 1 its sums then have variance 1, as section 3 asks of q and k. LayerNorm
# gives such inputs; for E the pixels are normalised (section 6), so that the patches enter at about
# 1 and are not drowned by the positions, at 0.35. The head: 0.02, so small that all classes begin
# about equally likely; the first loss is just above ln K, 2.30 for ten. The class token: 0.02.
# Biases: 0. The two matrices that end a branch, `attn.proj` and `mlp.fc2`: 0, so that every block
# begins as the identity. They learn all the same, as their inputs are not 0.
# paper: its code begins the matrices of the blocks by Xavier's rule, sqrt(2 / (inputs + outputs)),
# which is the same for q, k and v, and head and class token at 0; in pre-training, its head has a
# hidden layer.
#
# The sizes that have names, with their parameters for 1,000 classes, 224 x 224 pixels and patches
# of 16; for `cifar`, 10 classes, 32 x 32 and 4. Ti and S are from DeiT, B and L from the paper.
# The /16 is the patch they are known for; here `--patch-size` sets it for all of them.

VARIANTS = {
    #         dim  depth  heads      parameters
    "cifar": (192,    6,     3),   #  2,693,578
    "Ti/16": (192,   12,     3),   #  5,717,416
    "S/16":  (384,   12,     6),   # 22,050,664
    "B/16":  (768,   12,    12),   # 86,567,656
    "L/16": (1024,   24,    16),   # 304,326,632
}


class ViT(nn.Module):
    """The Vision Transformer (2010.11929, section 3.1).

    model(images): images (B, C, H, W) floats, H and W multiples of P; returns logits (B, K).
    model(images, return_attention=True) returns (logits, attention): L tensors (B, h, N, N), block
    1 first, the softmax weights before dropout, part of the autograd graph.
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
        rates = [config.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.initialise()

    @torch.no_grad()
    def initialise(self):
        """Set every weight as told above; LayerNorm begins with scale 1 and shift 0 by itself."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")   # 1 / sqrt(m)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.zeros_(block.attn.proj.weight)
            nn.init.zeros_(block.mlp.fc2.weight)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.zeros_(self.pos_embed)                          # the class token lies nowhere
        self.pos_embed[0, 1:] = sincos_positions(*self.grid, self.config.dim) / 2

    def positions(self, rows, cols):
        """The vectors of the places in a grid of patches: (1, 1 + rows * cols, D).

        For a grid other than that of training, they are resized like an image (paper, section
        3.2), so that a trained model can look at larger and at oblong images.
        """
        if (rows, cols) == self.grid:
            return self.pos_embed
        cls, places = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        places = places.transpose(1, 2).reshape(1, -1, *self.grid)      # (1, D, *self.grid)
        places = F.interpolate(places, size=(rows, cols), mode="bicubic")    # (1, D, rows, cols)
        places = places.flatten(2).transpose(1, 2)                      # (1, rows*cols, D)
        return torch.cat([cls, places], dim=1)                          # (1, 1 + rows*cols, D)

    def forward(self, images, return_attention=False):
        B, C, H, W = images.shape
        P = self.config.patch_size
        if H % P or W % P:
            raise ValueError(f"images of {H} x {W} pixels cannot be cut into patches of {P}")
        cls = self.cls_token.expand(B, -1, -1)                          # (B, 1, D)
        x = torch.cat([cls, self.patch_embed(images)], dim=1)           # (B, N, D)
        x = self.dropout(x + self.positions(H // P, W // P))            # (B, N, D)
        attention = []
        for block in self.blocks:
            x, weights = block(x, return_attention)                     # (B, N, D)
            if return_attention:
                attention.append(weights)
        logits = self.head(self.norm(x[:, 0]))                          # (B, K)
        return (logits, attention) if return_attention else logits


# What it costs. In multiply-adds, a block needs 3ND^2 for q, k and v, N^2 D for the scores, N^2 D
# for the means, ND^2 for `proj` and 8ND^2 for the MLP: together 12ND^2 + 2N^2 D.
#
#                              N     D       12ND^2     2N^2 D     a block    all L blocks
#     the default, 32/4       65   192       28.8 M      1.6 M      30.4 M          0.18 G
#     ViT-B, 224/16          197   768     1394.3 M     59.6 M    1454.0 M          17.4 G
#
# So at these sizes the N^2 of attention is a small part. With one token a pixel, 2N^2 D alone would
# be 3,867 G in each block of ViT-B.
#
# Why a ViT needs more data than a CNN. A CNN has two assumptions about images built in (its
# inductive bias): what matters is near (locality), and it looks the same wherever it lies (weight
# sharing). What one of its numbers can see of the image, its receptive field, grows layer by layer.
# A ViT assumes less: how patches are cut, that the same weights treat each of them, and, by the
# waves above, which are near. From the first block on any patch may look at any other, and which of
# them are worth it must be learned. With hundreds of millions of images that freedom wins (paper,
# figure 3). With fifty thousand we state the assumptions in another form: altered copies of each
# image under the same label.
#
# To see what the CNN's assumptions are worth, the same loop also trains one, ResNet-18
# (1512.03385). As is usual for small images, its first convolution is 3 x 3 with stride 1, and the
# max-pool after it is gone. It has 11.2 M parameters and is trained by AdamW alone (section 7).

def make_model(name, config):
    """The ViT of a configuration; or "resnet18" from torchvision, which takes C and K from it."""
    if name == "vit":
        return ViT(config)
    model = resnet18(num_classes=config.num_classes)
    model.conv1 = nn.Conv2d(config.in_channels, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


# ---- 6. Data and augmentation --------------------------------------------------------------------
#
# The images lie in two uint8 tensors, training and test, on the device that trains; CIFAR-10 takes
# 184 MB. A batch is an index into the first and is augmented there as well: no worker processes to
# wait for, and one seed draws all that is random.
#
# First, how a file becomes RGB. Files from the world have quirks that a plain decoder passes on: a
# camera that notes "turn me" instead of turning, transparency, grey values of 16 bits.

def open_image(path, background=(128, 128, 128)):
    """Read an image file as an upright RGB PIL image; `background` shows where it is transparent.

    Of an animation the first frame is taken, with a note on stderr. Raises InputError for what
    cannot be read as an image.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # of damaged EXIF data, for one
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                # MPO: a phone's photo and its by-products, to be taken for one picture
                frames = 1 if file.format == "MPO" else getattr(file, "n_frames", 1)
                image = ImageOps.exif_transpose(file)
            if image.mode == "F" or image.mode == "I" and max(map(abs, image.getextrema())) > 65535:
                raise ValueError("its numbers are no grey values of 8 or 16 bits")
            if image.mode.startswith("I"):      # 16 bits of grey: convert() would cut off at 255
                image = image.convert("I").point(lambda value: value / 257).convert("L")
            if image.has_transparency_data:
                ground = Image.new("RGBA", image.size, (*background, 255))
                image = Image.alpha_composite(ground, image.convert("RGBA"))
            image = image.convert("RGB")
    except Exception as error:          # on foreign bytes, decoders raise errors of every kind
        raise InputError(f"{path} cannot be read as an image ({error}); check the path, or save it "
                         f"as PNG in another program") from None
    if frames > 1:
        print(f"note: {path} holds {frames} pictures; the first is used", file=sys.stderr)
    return image


def square_of(image):
    """The largest square in the middle of a PIL image: (left, top, right, bottom) in pixels."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return left, top, left + side, top + side


def fit(image, size):
    """The middle square of a PIL image, resized to (size, size)."""
    return image.crop(square_of(image)).resize((size, size), Image.Resampling.BICUBIC)


# Second, a data set that needs no file: `shapes`. A coloured disc or ring at a random place, of a
# random size, over a cloudy grey ground and a grey disc or ring that means nothing. The class is
# colour and form together, ten in all. It is learned in minutes; and since we know which pixels
# carry the answer, an attention map can be checked against the truth (test_vit.py does).

COLOURS = {"red": (220, 50, 50), "green": (50, 180, 70), "blue": (60, 90, 220),
           "yellow": (220, 200, 50), "purple": (170, 60, 190)}
SHAPE_CLASSES = [f"{colour} {form}" for colour in COLOURS for form in ("disc", "ring")]
SHAPE_COUNTS = {"train": 4000, "test": 1000}


def draw_figure(ring, size, generator):
    """The pixels of a disc or ring of random radius and place: (size, size) bool."""
    r, x, y = torch.rand(3, generator=generator)
    radius = size * (0.14 + 0.12 * r)
    x, y = radius + x * (size - 2 * radius), radius + y * (size - 2 * radius)
    middle = torch.arange(size) + 0.5                                       # of each pixel
    distance = torch.hypot(middle[None, :] - x, middle[:, None] - y)        # (S, S)
    return (distance <= radius) & (distance >= (0.5 * radius if ring else 0))


def make_shapes(n, image_size, seed):
    """Draw n images (S = image_size); the same seed gives the same pixels.

    Returns images uint8 (n, 3, S, S), labels int64 (n,), which go round the ten classes, and masks
    bool (n, S, S), the pixels of the coloured figure.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.empty(n, 3, image_size, image_size, dtype=torch.uint8)
    labels = torch.arange(n) % len(SHAPE_CLASSES)
    masks = torch.empty(n, image_size, image_size, dtype=torch.bool)
    colours = torch.tensor(list(COLOURS.values())).float()
    for i in range(n):
        clouds = 80 + 90 * torch.rand(1, 1, 5, 5, generator=generator)          # (1, 1, 5, 5)
        image = F.interpolate(clouds, size=(image_size, image_size), mode="bilinear",
                              align_corners=True)[0].repeat(3, 1, 1)        # (3, S, S)
        ring, grey = torch.rand(2, generator=generator)
        image[:, draw_figure(ring < 0.5, image_size, generator)] = 40 + 180 * grey
        masks[i] = draw_figure(labels[i] % 2 == 1, image_size, generator)   # on top, never hidden
        image[:, masks[i]] = colours[labels[i] // 2][:, None]
        image += 10 * torch.randn(image.shape, generator=generator)
        images[i] = image.clamp(0, 255)
    return images, labels, masks


# Third, the two parts of a data set, "train" and "test". Here the three kinds of data meet.

def open_split(data, split, image_size):
    """One part of `data`: a sequence of (PIL image, label), and the names of the classes.

    Raises InputError when the data are missing, damaged or laid out in another way.
    """
    if data == "shapes":
        if image_size > 256:
            raise InputError(f"--data shapes can be drawn up to --image-size 256, not {image_size}")
        images, labels, _ = make_shapes(SHAPE_COUNTS[split], image_size, seed=int(split == "test"))
        return [(to_pil_image(x), y) for x, y in zip(images, labels.tolist())], SHAPE_CLASSES
    try:
        if data == "cifar10":
            images = CIFAR10("data", train=split == "train", download=True)
        else:
            folder = Path(data) / split
            if split == "test" and not folder.is_dir():
                folder = Path(data) / "val"
            images = ImageFolder(folder, loader=open_image)
    except Exception as error:                  # of the disk, the network, or a damaged archive
        if data == "cifar10":
            raise InputError(f"CIFAR-10 could not be fetched or is damaged ({error}); put "
                             f"{CIFAR10.filename} from {CIFAR10.url} into "
                             f"{Path('data').resolve()}, or use --data shapes") from None
        raise InputError(f"--data {data} does not work ({error}); give cifar10, shapes, or a "
                         f"folder with train/CLASS/* and test/CLASS/* (or val/CLASS/*)") from None
    return images, images.classes


def say(text, keep=True):
    """Print a line. keep=False: a status, for terminals only, which the next line overwrites."""
    terminal = sys.stdout and sys.stdout.isatty()               # None: closed before we began
    try:
        if keep or terminal:
            print(("\r\033[K" if terminal else "") + text, end="\n" if keep else "", flush=True)
    except OSError as error:
        sys.stdout = None                                       # what it still holds can go nowhere
        raise InputError(f"standard output cannot be written ({error.strerror}); give it a file "
                         f"or a terminal that stays open") from None


def decode(pictures, image_size, device):
    """Pairs (PIL image, label) as tensors on the device: uint8 (n, 3, S, S), int64 (n,)."""
    images = torch.empty(len(pictures), 3, image_size, image_size, dtype=torch.uint8)
    labels = torch.empty(len(pictures), dtype=torch.int64)
    for i, (picture, label) in enumerate(pictures):
        images[i], labels[i] = pil_to_tensor(fit(picture, image_size)), label
        if i % 1000 == 0:
            say(f"reading images: {i:,} of {len(pictures):,}", keep=False)
    return images.to(device), labels.to(device)


@dataclass
class Data:
    """A data set on its device. mean and std are those of training images, from 0 to 1."""
    images: torch.Tensor            # uint8 (n, C, S, S)
    labels: torch.Tensor            # int64 (n,)
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: list                   # K names
    mean: torch.Tensor              # (C, 1, 1)
    std: torch.Tensor               # (C, 1, 1)
    alter: bool                     # False: they are flipped, no more (see below)


MOST_BYTES = 16 * 2**30     # of decoded images: more would fill most machines


def load_data(config, image_size, device):
    """Both parts of config.data. Raises InputError when they cannot be trained on."""
    pictures, classes = open_split(config.data, "train", image_size)
    test_pictures, test_classes = open_split(config.data, "test", image_size)
    if classes != test_classes:
        odd = sorted(set(classes) ^ set(test_classes))
        raise InputError(f"--data {config.data} has classes in only one of train and test, "
                         f"{odd[0]!r} for one; give both the same folders")
    if len(classes) < 2:
        raise InputError(f"--data {config.data} has one class, {classes[0]!r}; add another")
    if config.batch_size > len(pictures):
        raise InputError(f"--batch-size {config.batch_size} is more than the {len(pictures)} "
                         f"training images; make it smaller")
    size = (len(pictures) + len(test_pictures)) * 3 * image_size**2
    if size > MOST_BYTES:
        raise InputError(f"--data {config.data} takes {size / 2**30:.1f} GiB at --image-size "
                         f"{image_size}; make that smaller, or MOST_BYTES in vit.py larger")
    images, labels = decode(pictures, image_size, device)
    test_images, test_labels = decode(test_pictures, image_size, device)
    some = images[::max(1, len(images) // 1000)].float() / 255              # a sample will do
    std, mean = torch.std_mean(some, dim=(0, 2, 3), keepdim=True)           # (1, C, 1, 1)
    return Data(images, labels, test_images, test_labels, classes, mean[0], std[0].clamp(min=0.01),
                alter=config.data != "shapes")


# Last, the altered copies. Each alteration claims that something may change in a picture without
# changing its name:
#
#   - A flip, left to right: a cat in a mirror is a cat. (False for text, and for some road signs.)
#   - A shift by up to an eighth of the side, 4 pixels of 32: things need not be in the middle. It
#     also moves the content against the grid of patches, so that no edge always falls at the same
#     place of a patch. The rim laid bare is filled with 0, which is the mean colour.
#   - A policy, TrivialAugment (2103.10158): one of fourteen operations, of random strength, such as
#     turn, shear, move, darken, fewer colours. A cat in other light, or tilted, is a cat; but the
#     strongest leave little of it: of 32 pixels moved by 32, nothing.
#   - A mix of two images under a mix of their labels. MixUp (1710.09412) lays one over the other,
#     CutMix (1905.04899) pastes in a rectangle. Halfway between two pictures the answer should be
#     halfway too, and a part that can be seen should be enough.
#
# `shapes` are told apart by colour and lie everywhere already: they are only flipped.
#
# How much of the strong ones, policy and mix? In a short run a model hardly learns even the plain
# images; in a long one it would know them by heart. So the share depends on the length of the run:
# none up to 10 epochs, all from 70, as in published recipes of 100 epochs and more. (Measured with
# this rule: 12 and 25 epochs. For longer runs it is a guess.) In the last tenth of a run nothing is
# mixed: the model ends on whole images, each with one label.

def strong_share(epochs):
    """The share of images that get the policy, and of batches that are mixed: 0 to 1."""
    return min(1.0, max(0.0, (epochs - 10) / 60))


def normalise(images, mean, std):
    """uint8 (B, C, H, W) -> float32 (B, C, H, W) of mean about 0 and deviation about 1."""
    return (images.float() / 255 - mean) / std


def shift_and_flip(x, most):
    """Move each image of a batch by up to `most` pixels, flip half at random: (B, C, H, W) float.

    `unfold` shows the padded images through every possible window of the old size, without copying
    any of them; one indexing operation then picks a window for each.
    """
    B, _, H, W = x.shape
    x = F.pad(x, (most, most, most, most))                      # (B, C, H+2*most, W+2*most)
    windows = x.unfold(2, H, 1).unfold(3, W, 1)                 # (B, C, 2*most+1, 2*most+1, H, W)
    top, left = torch.randint(2 * most + 1, (2, B), device=x.device)        # (B,) each
    x = windows[torch.arange(B, device=x.device), :, top, left]             # (B, C, H, W)
    flip = torch.rand(B, 1, 1, 1, device=x.device) < 0.5
    return torch.where(flip, x.flip(3), x)                                  # (B, C, H, W)


def augment(images, labels, data, policy=0.0, mix=0.0):
    """A new version of a batch: images uint8 (B, C, H, W) -> float32, labels int64 (B,).

    The policy draws one operation a call, so it is called on slices of eight images, each with
    probability `policy`: many operations in one step. With probability `mix` the batch is mixed,
    and then the labels are float32 (B, K).
    """
    if policy:
        trivial = v2.TrivialAugmentWide(fill=128)                           # grey, where laid bare
        images = torch.cat([trivial(part) if torch.rand(()) < policy else part
                            for part in images.split(8)])                   # (B, C, H, W)
    x = normalise(images, data.mean, data.std)
    x = shift_and_flip(x, images.shape[-1] // 8 if data.alter else 0)       # (B, C, H, W)
    if mix and torch.rand(()) < mix:
        K = len(data.classes)
        x, labels = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=K),
                                     v2.CutMix(alpha=1.0, num_classes=K)])(x, labels)   # (B, K)
    return x, labels


# ---- 7. Optimisation -----------------------------------------------------------------------------
#
# AdamW (1711.05101) divides the running mean of each weight's gradient by that gradient's usual
# size, so that every weight moves at about the same pace. Muon (Keller Jordan, 2024; 2502.16982)
# takes the gradient of a matrix as a whole: by a few matrix products it brings all singular values
# of the running mean, the strengths of the directions it would push in, to about 1. The few
# directions that dominate a gradient then count no more than the rare ones, which are learned as
# well. The numbers in such a step are small, about 1 / sqrt(D), where AdamW's are nearer to 1: so
# its rate is larger. (PyTorch's Muon also lengthens the step of a tall matrix, by sqrt(rows /
# columns).) A vector has but one singular value, its length, and what meets raw pixels or single
# classes (`patch_embed`, `head`) fares better with AdamW in practice: Muon gets the matrices of the
# blocks, where it takes `qkv` as one.
#
# Weight decay pulls weights to 0, so that only what the data keep asking for stays large: each step
# takes rate * decay * w off a weight w. This suits matrices, whose size is how strongly they mix.
# Biases and the scales of LayerNorm set levels, `cls_token` and `pos_embed` are inputs: these mix
# nothing, and are left alone.

def parameter_groups(model):
    """Three lists: the blocks' matrices, other weights that decay, and the rest, which does not."""
    matrices, decay, rest = [], [], []
    for name, parameter in model.named_parameters():
        if not name.endswith("weight") or parameter.ndim == 1:
            rest.append(parameter)
        elif name.startswith("blocks."):
            matrices.append(parameter)
        else:
            decay.append(parameter)
    return matrices, decay, rest


def make_optimizers(model, config):
    """Muon and AdamW, or AdamW alone: a list. Every group notes its highest rate as "peak"."""
    matrices, decay, rest = parameter_groups(model)
    if config.optimizer == "adamw":
        matrices, decay = [], matrices + decay
    optimizers = [torch.optim.AdamW([
        {"params": decay, "weight_decay": config.weight_decay, "peak": config.lr},
        {"params": rest, "weight_decay": 0.0, "peak": config.lr}])]
    if matrices:
        optimizers.append(torch.optim.Muon([{"params": matrices, "peak": config.muon_lr}],
                                           weight_decay=config.weight_decay))
    return optimizers


# The learning rate rises along a line, because the first gradients soon point elsewhere and the
# running means rest on few samples: full steps could go far in a wrong direction. Then it falls
# along half a cosine: at a constant rate the weights keep jumping about in the valley, and small
# steps let them settle. The cosine stays high for much of the run, ends flat, and has nothing to
# tune. As all this depends on the step alone, a resumed run needs no memory of it.

def learning_rate(step, total_steps, warmup_steps, peak, final=0.0):
    """The rate at `step`, from 0: peak is reached at warmup_steps, final at total_steps."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)   # 0 to 1
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


# Mixed precision. Products of 16-bit numbers are several times faster where the hardware has units
# for them. Under autocast the weights stay in float32, and what enters a product is rounded on the
# way; the loss is computed in float32. bf16 keeps the range of float32 with fewer digits and needs
# no further care. fp16 has more digits but a small range, in which small gradients would become 0.
# So a scaler multiplies the loss by a large factor, 65,536 at first, before the backward pass, and
# divides the gradients by it afterwards. A step that overflows is skipped and halves the factor;
# after many that do not it is doubled.

def pick_device(name):
    """"auto" takes cuda, then mps, then cpu. Raises InputError for a device that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    if name == "auto":
        name = next(device for device in there if there[device])
    if not there[name]:
        raise InputError(f"--device {name}: PyTorch sees no such device; use --device auto")
    return torch.device(name)


def pick_precision(amp, device):
    """The dtype of matrix products: what `amp` names; for "auto", bf16 or fp16 where it is fast."""
    named = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}
    if amp != "auto":
        return named[amp]
    if device.type == "cuda":
        new = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if new else torch.float16
    can = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return torch.bfloat16 if can.get("amx_bf16") or can.get("avx512_bf16") else torch.float32


# Clipping. Now and then a batch has a gradient many times longer than usual, and it would rule the
# running means of both optimizers for many steps. So the gradient of all parameters together is
# shortened to `clip` where it is longer. The scaler's factor must come off first, or the limit
# would meet numbers 65,536 times too large. Two optimizers share the scaler, which notes for each
# whether its own gradients were finite; but the length is that of all, and one NaN anywhere would
# pass through it into the healthy gradients of the other. So both step or neither.

def update(loss, model, optimizers, scaler, clip):
    """One step of all optimizers down the gradient of `loss`; returns the gradient's length."""
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not scaler.is_enabled() or norm.isfinite():      # to ask is to wait for the GPU: fp16 only
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    return norm


# ---- 8. Evaluation, checkpoints, training --------------------------------------------------------
#
# The loss is the cross-entropy, -ln of the probability that the model gives to the right class: 0
# if it is certain and right, ln K if it has no idea. While training, the target is softened: 0.9
# for the right class and 0.1 spread over all (label smoothing). Against a hard target a model is
# never done: by driving the logits of what it knows further apart it can always lower its loss. The
# softened one says when to stop.
#
# What counts in the end is the accuracy: how often is the most probable class the right one, on
# images that were never trained on? Dropout and drop path are off then (`model.eval()`).

@torch.inference_mode()
def predict(model, images, mean, std, dtype):
    """The logits (n, K), float32, of images uint8 (n, C, H, W)."""
    model.eval()
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        logits = [model(normalise(batch, mean, std)) for batch in images.split(500)]    # (B, K)
    return torch.cat(logits).float()


def evaluate(model, data, dtype):
    """Mean cross-entropy and accuracy (0 to 1) on the test images: two floats."""
    logits = predict(model, data.test_images, data.mean, data.std, dtype)       # (n, K)
    right = logits.argmax(dim=1) == data.test_labels                            # (n,)
    return F.cross_entropy(logits, data.test_labels).item(), right.float().mean().item()


# What a run consists of, and what is noted of each epoch, in the checkpoint and in the log (.csv):

LOG = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second",
       "seconds")


@dataclass
class Run:
    """What changes while training, and the model's configuration."""
    vit_config: ViTConfig
    model: nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler
    history: list                   # a dict with the keys LOG for each epoch
    saved: bool = False             # has this run written a checkpoint yet?


# A checkpoint holds what a run needs to go on and what `viz` needs to rebuild the model, as tensors
# and plain Python values, so that it can be read without running code from the file
# (`weights_only`). The weights are those of the last epoch. To keep those of the best would be to
# choose by the test images, and their accuracy would no longer be that of unseen data.
#
# What follows, down to "Now the epoch", keeps files whole and finds out damaged ones; skip it on a
# first reading.

@contextmanager
def whole_file(path):
    """Write to a temporary neighbour, then move it to `path`: at every moment the old file or the
    new one is there, whole. Raises InputError if it cannot be written."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")       # the process: two runs must not share it
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:            # on a full disk, torch.save raises either
        reason = getattr(error, "strerror", None) or "is the disk full?"
        raise InputError(f"{path} could not be written ({reason}); what was there is untouched, "
                         f"make room or give another --out") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def same_file(a, b):
    with suppress(OSError):             # an impossible name, or no such file
        return os.path.samefile(a, b)
    return os.path.realpath(a) == os.path.realpath(b)


def check_output(path, *suffixes):
    """Make sure that files can be put at `path`, before hours go into their content."""
    if Path(os.path.basename(path)).suffix != suffixes[0]:
        raise InputError(f"--out {path} must be the name of a {suffixes[0]} file")
    for file in (Path(path).with_suffix(suffix) for suffix in suffixes):
        try:
            if file.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            tempfile.NamedTemporaryFile(prefix=file.name, dir=file.parent).close()
        except OSError as error:
            raise InputError(f"--out {path}: {file} cannot be written ({error.strerror}); give "
                             f"another name, in a folder that is there") from None


def set_aside(path):
    """Rename what an earlier run wrote, so that it stays."""
    files = [Path(path).with_suffix(suffix) for suffix in (".pt", ".csv", ".png")]
    tags = (f".old{n if n > 1 else ''}" for n in itertools.count(1))
    tag = next(tag for tag in tags if not any(f.with_stem(f.stem + tag).exists() for f in files))
    for file in (file for file in files if file.exists()):
        os.replace(file, file.with_stem(file.stem + tag))
        say(f"{file} was there already; it is now {file.stem}{tag}{file.suffix}")


def draw_curves(history, path):
    """Loss and accuracy over the epochs, a PNG."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        for half, label in (("train_", "training, on altered images"), ("test_", "test")):
            axes.plot([row["epoch"] for row in history], [row[half + what] for row in history],
                      "o-", markersize=3, label=label)
        axes.set(xlabel="epoch", title=what)
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    with whole_file(path) as file:
        figure.savefig(file, format="png")


def save_run(run, config, data):
    """Write the checkpoint, then the log and the curves anew from its history."""
    checkpoint = {"format": 1, "vit": asdict(run.vit_config), "train": asdict(config),
                  "images": len(data.images), "classes": data.classes,
                  "mean": data.mean.flatten().tolist(), "std": data.std.flatten().tolist(),
                  "model": run.model.state_dict(),
                  "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
                  "scaler": run.scaler.state_dict(), "epoch": len(run.history),
                  "history": run.history}
    with whole_file(config.out) as file:
        torch.save(checkpoint, file)
        if not run.saved and not (config.resume and same_file(config.out, config.resume)):
            set_aside(config.out)           # not before the new file is whole
    run.saved = True
    with whole_file(Path(config.out).with_suffix(".csv")) as file, open(file, "w", newline="") as f:
        writer = csv.DictWriter(f, LOG)
        writer.writeheader()
        writer.writerows(run.history)
    draw_curves(run.history, Path(config.out).with_suffix(".png"))


def check_parts(checkpoint):
    """Do the parts of a checkpoint fit together? Raises ValueError, or what a wrong type raises."""
    vit, train, history = checkpoint["vit"], checkpoint["train"], checkpoint["history"]
    if vit.in_channels != 3 or vit.num_classes < 2:
        raise ValueError("it is not for RGB images of two classes or more")
    with torch.device("meta"):              # shapes without memory, whatever sizes it declares
        wanted = make_model(train.model, vit).state_dict()
    weights = checkpoint["model"]
    if {k: w.shape for k, w in weights.items()} != {k: w.shape for k, w in wanted.items()}:
        raise ValueError("its weights do not fit its configuration")
    if not all(w.is_contiguous() and w.float().isfinite().all() for w in weights.values()):
        raise ValueError("some of its weights are not finite")
    mean, std = torch.tensor([checkpoint["mean"], checkpoint["std"]])
    if mean.shape != (3,) or not ((mean >= 0) & (mean <= 1) & (std >= 0.01) & (std <= 1)).all():
        raise ValueError("its mean and std are not those of RGB images")
    if [type(name) for name in checkpoint["classes"]] != vit.num_classes * [str]:
        raise ValueError("its classes are not the names of what it tells apart")
    if not 0 < checkpoint["epoch"] == len(history) <= train.epochs or checkpoint["images"] < 1:
        raise ValueError("its history is not one entry for each epoch")
    if not all(tuple(row) == LOG and all(map(math.isfinite, row.values())) for row in history):
        raise ValueError("its history is not numbers under the log's columns")


def load_checkpoint(path):
    """A checkpoint as a dict, its configurations as objects. Raises InputError if it is none.

    A model that was wrapped before it was saved, by torch.compile or DataParallel, has prefixes
    before the names of its weights; they are taken off.
    """
    try:
        with zipfile.ZipFile(path) as archive:          # verifies checksums; torch.load does not
            if damaged := archive.testzip():
                raise ValueError(f"damaged at {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if type(checkpoint) is not dict:
            raise ValueError(f"it holds a {type(checkpoint).__name__}")
        if checkpoint["format"] != 1:
            raise ValueError(f"its format is {checkpoint['format']}, not 1")
        checkpoint |= {"vit": ViTConfig(**checkpoint["vit"]),
                       "train": TrainConfig(**checkpoint["train"]),
                       "model": {name.replace("_orig_mod.", "").replace("module.", ""): weight
                                 for name, weight in checkpoint["model"].items()}}
        check_parts(checkpoint)
        return checkpoint
    except Exception as error:          # whatever zip, pickle or the parts make of a foreign file
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):   # PyTorch's text tells how to run the code
            reason = "it holds more than tensors and plain values"
        raise InputError(f"{path} is not a whole checkpoint of vit.py ({reason}); check the path, "
                         f"or make one: python vit.py train") from None


def restore(run, data, checkpoint):
    """Fill a new Run from a checkpoint. Raises InputError if the data are not those it saw."""
    if (checkpoint["classes"] != data.classes or checkpoint["images"] != len(data.images)
            or not torch.allclose(torch.tensor(checkpoint["mean"]), data.mean.flatten().cpu())):
        raise InputError("these are not the images that the checkpoint was trained on; give the "
                         "same --data, or start a new run without --resume")
    run.model.load_state_dict(checkpoint["model"])
    try:
        for optimizer, state in zip(run.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state["state"]})
            for parameter, values in optimizer.state.items():
                if not values or any(value.shape != (() if name == "step" else parameter.shape)
                                     for name, value in values.items()):
                    raise ValueError("it is of other weights")
        if checkpoint["scaler"]:                        # empty unless the run was in fp16
            run.scaler.load_state_dict(checkpoint["scaler"])
    except Exception as error:          # whatever PyTorch makes of a foreign state
        raise InputError(f"the checkpoint's optimizers do not fit its run ({error}); start a new "
                         f"run without --resume") from None
    run.history = checkpoint["history"]


# Now the epoch. Its random numbers depend on the seed and on the epoch alone: resumed after epoch
# 3, a run draws in epoch 4 what it would have drawn anyway.
#
# On a GPU, to read the loss is to wait for it, and meanwhile nothing new is sent there. So it is
# read twice a second and not at every step; the line of step 21 stays on the screen, to tell early
# how long the run will take. Each reading is also a check: once the loss is infinite or no number,
# all further steps are wasted.

def train_epoch(run, data, config, dtype):
    """One pass over the training images in a new order: mean loss, accuracy, images a second."""
    epoch, device, B = len(run.history), data.images.device, config.batch_size
    torch.manual_seed(config.seed + 1_000_003 * (epoch + 1))    # + 1: `seed` drew the weights
    run.model.train()
    order = torch.randperm(len(data.images), device=device)
    steps = len(order) // B             # the few images that fill no batch wait for another epoch
    total_steps, total = config.epochs * steps, torch.zeros(2, device=device)
    policy = strong_share(config.epochs) if data.alter else 0.0
    mix = policy if epoch < 0.9 * config.epochs else 0.0
    begun = looked = time.perf_counter()
    for i in range(steps):
        step = epoch * steps + i
        for group in (g for optimizer in run.optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(step, total_steps, round(config.warmup * total_steps),
                                        group["peak"])
        batch = order[i * B:(i + 1) * B]                                    # (B,)
        images, labels = augment(data.images[batch], data.labels[batch], data, policy, mix)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = run.model(images)                                      # (B, K)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        update(loss, run.model, run.optimizers, run.scaler, config.clip)
        if labels.ndim == 2:            # mixed: the right answer is the class with the larger part
            labels = labels.argmax(dim=1)                                   # (B,)
        right = (logits.argmax(dim=1) == labels).float().mean()
        total += torch.stack([loss.detach(), right])
        now = time.perf_counter()
        if now - looked > 0.5 or step == 20 or i + 1 == steps:
            looked, pace = now, (now - begun) / (i + 1)                     # seconds a step
            mean_loss, accuracy = (total / (i + 1)).tolist()
            if not math.isfinite(mean_loss):
                raise InputError(f"the loss is {mean_loss} at step {step}; nothing of this epoch "
                                 f"is saved. Try a lower --lr and --muon-lr, or --amp off")
            say(f"epoch {epoch + 1}/{config.epochs}  step {i + 1}/{steps}  loss {mean_loss:.3f}  "
                f"rate {group['lr']:.1e}  {B / pace:,.0f} images/s  "    # the last group's: Muon's
                f"{pace * (total_steps - step - 1) / 60:.1f} min left", keep=step == 20)
    return mean_loss, accuracy, B / pace


def prepare(config, vit_config, checkpoint=None):
    """Load the data, make or restore the model, and say what is about to be done."""
    device = pick_device(config.device)
    dtype = pick_precision(config.amp, device)
    data = load_data(config, vit_config.image_size, device)
    vit = replace(vit_config, num_classes=len(data.classes))
    torch.manual_seed(config.seed)
    model = make_model(config.model, vit).to(device)
    if config.compile:
        model.compile()                 # in place: the names of the weights stay as they are
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(vit, model, make_optimizers(model, config), scaler, [])
    if checkpoint:
        restore(run, data, checkpoint)
        say(f"{config.resume} goes on after epoch {len(run.history)}")
    patches, name = (vit.image_size // vit.patch_size) ** 2, config.model
    if name == "vit":
        name = f"{vit.depth} blocks, {vit.num_heads} heads, width {vit.dim}, {patches + 1} tokens"
        if patches < 16:
            say(f"warning: {patches} patches are too few to attend to; make --patch-size smaller")
    say(f"model   {name}, {sum(p.numel() for p in model.parameters()):,} parameters\n"
        f"data    {config.data}: {len(data.images):,} training and {len(data.test_images):,} test "
        f"images of {vit.image_size} x {vit.image_size}, {len(data.classes)} classes\n"
        f"run     {config.epochs} epochs in batches of {config.batch_size}, "
        f"{' + '.join(type(o).__name__ for o in run.optimizers)}, seed {config.seed}, on {device} "
        f"in {str(dtype).removeprefix('torch.')}")
    return run, data, dtype


# The two losses of the log are not comparable: that of training has the smoothing in it as well.

LOG_HEADING = """
       on altered images, while     on the test images,
       the model is learning        after the epoch
epoch        loss   accuracy        loss  accuracy      images/s      time"""


def train(run, data, config, dtype):
    """The epochs that are left, with a test and a checkpoint after each."""
    first = len(run.history) + 1
    for epoch in range(first, config.epochs + 1):
        start = time.perf_counter()
        loss, accuracy, speed = train_epoch(run, data, config, dtype)
        test_loss, test_accuracy = evaluate(run.model, data, dtype)
        seconds = time.perf_counter() - start
        if not math.isfinite(test_loss):    # the weights went wrong in the very last step
            raise InputError(f"the test loss is {test_loss} after epoch {epoch}, which is not "
                             f"saved. Try a lower --lr and --muon-lr, or --amp off")
        run.history.append(dict(zip(LOG, (epoch, loss, accuracy, test_loss, test_accuracy, speed,
                                          seconds))))
        save_run(run, config, data)
        if epoch == first:
            say(LOG_HEADING)
        say(f"{epoch:5}  {loss:10.4f}  {accuracy:9.2%}  {test_loss:10.4f}  {test_accuracy:8.2%}  "
            f"{speed:12,.0f}  {seconds:7,.0f} s")


# ---- 9. Seeing: attention, rollout, relevance ----------------------------------------------------
#
# Where did the model look? Three answers, each of which takes in more than the last. Each uses the
# weights of section 3, (B, h, N, N) for every block, and gives a number for every patch. Token 0 is
# the class token: row 0 is what it took, and columns 1 and up are the patches.
#
# CLS attention (CLS: the class token) is that row of block l, A_l[head, 0, 1:] for each head: what
# the class token read there. But it read tokens, and these had read others in the blocks before.
#
# Rollout (Abnar and Zuidema, 2005.00928) follows that back. It assumes that half of what leaves a
# block came through the residual connection and half through attention:
#
#     A'_l = 1/2 (mean of A_l over heads) + 1/2 I,      R = A'_L ... A'_2 A'_1
#
# Later blocks are on the left, as matrices act on what stands to their right. Row i of R sums to 1
# and says, on that assumption, of which input tokens output token i is made. Left out are the
# values, the MLPs and the head: the map is the same for every class.

def rollout_matrix(attention):
    """attention: L tensors (B, h, N, N), block 1 first; returns R (B, N, N), rows sum to 1."""
    R = identity = torch.eye(attention[0].shape[-1], device=attention[0].device)
    for A in attention:
        R = (A.mean(dim=1) + identity) / 2 @ R                          # (B, N, N)
    return R


def attention_rollout(attention):
    """Of which patches the class token is made in the end: (B, N-1)."""
    return rollout_matrix(attention)[:, 0, 1:]


# Relevance (Chefer, Gur and Wolf, 2103.15679) asks about one class c. The gradient of its logit y_c
# with respect to a weight of attention says whether more of it would raise the logit. Gradient
# times weight, cut off below 0, is taken as the evidence that flowed there. The mean over heads
# comes after the cut, or a head that speaks against the class would silence one that speaks for it:
#
#     G_l = mean over heads of max(0, dy_c/dA_l * A_l), number by number
#     R = I;  then R <- R + G_l R for l = 1 ... L
#
# In R + G_l R, the R alone stands for the residual connection. Rows are not normalised. Of the
# three maps this alone can tell classes apart. It sees no evidence against a class, and of the MLPs
# no more than their gradient.

def relevance_matrix(attention, gradients):
    """attention, gradients: L tensors (B, h, N, N), block 1 first; returns R (B, N, N)."""
    R = torch.eye(attention[0].shape[-1], device=attention[0].device)
    for A, gradient in zip(attention, gradients, strict=True):
        R = R + (gradient * A).clamp(min=0).mean(dim=1) @ R             # (B, N, N)
    return R


def relevance(model, images, target):
    """How much each patch speaks for a class: (B, N-1) float32, not normalised.

    images (B, C, H, W), normalised; target: a class index, or int64 (B,). Computed in float32 and
    in eval mode; the model is left in the mode it was in.
    """
    training = model.training
    model.eval()
    images = images.detach().float().requires_grad_()       # a graph, even for a frozen model
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        logits, attention = model(images, return_attention=True)
    model.train(training)
    target = torch.as_tensor(target, device=images.device).expand(len(images))
    total = logits.gather(1, target[:, None]).sum() # images do not mix: each keeps its own gradient
    gradients = torch.autograd.grad(total, attention)
    return relevance_matrix([A.detach() for A in attention], gradients)[:, 0, 1:]


def times_uniform(values):
    """A map (..., N-1) as multiples of an even one: 1 is no preference. Zeros stay zeros."""
    mean = values.mean(dim=-1, keepdim=True)
    return values / mean.where(mean > 0, 1)


# The picture. On the left is the answer: the image, the square the model gets, what it says, and
# the three maps. On the right is what the class token read in every block and head. Each patch is
# one even square, as attention knows nothing finer. (The rest of this section is drawing.)

def show_map(axes, values, view, grid, top, alpha=1.0):
    """Lay a map (N-1,), scale 0 to `top`, over the grey image; returns what a colour bar needs."""
    extent = (0, view.width, view.height, 0)
    axes.imshow(view.convert("L"), cmap="gray", vmin=-255, vmax=511, extent=extent)     # faded
    axes.set(xticks=[], yticks=[])
    return axes.imshow(values.reshape(grid).numpy(), cmap="viridis", vmin=0, vmax=top, alpha=alpha,
                       interpolation="nearest", extent=extent)


def draw_answer(figure, photo, truth, view, bars, maps, model):
    """The left. bars: [(class, probability)], best first; maps: {title: (N-1,)}, times uniform."""
    (image, model_view, says), below = figure.add_gridspec(
        2, 3, left=0.02, right=0.6, top=0.85, bottom=0.11, wspace=0.36, hspace=0.2).subplots()
    left, top, right, bottom = square_of(photo)
    small = photo.copy()
    small.thumbnail((800, 800))                     # drawing 48 megapixels would take seconds
    image.imshow(small, extent=(0, photo.width, photo.height, 0))
    image.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="crimson",
               lw=2, clip_on=False)
    image.set_title(f"the image: {truth or f'{photo.width} x {photo.height}'}", parse_math=False)
    image.set(xticks=[], yticks=[])
    model_view.imshow(view, extent=(0, view.width, view.height, 0))
    lines = range(0, view.width + 1, model.config.patch_size)
    model_view.set(title=f"what the model sees, {model.grid[0]} x {model.grid[1]} patches",
                   xticks=lines, yticks=lines)
    model_view.tick_params(length=0, labelbottom=False, labelleft=False)
    model_view.grid(color="white", lw=0.6)
    for i, (name, probability) in enumerate(bars):
        says.barh(i, probability, color="tab:blue", height=0.36)
        says.text(0, i - 0.24, name[:30], va="bottom", parse_math=False)
        says.text(probability + 0.03, i, f"{probability:.1%}", va="center")
    says.set(title="what it says", xlim=(0, 1.25), ylim=(4.5, -0.7))
    says.axis("off")
    tops = [float(values.max()) for values in maps.values()]
    tops[:2] = [max(tops[:2])] * 2                  # attention and rollout share a scale
    for axes, (title, values), top in zip(below, maps.items(), tops):
        drawn = show_map(axes, values, view, model.grid, max(top, 1), alpha=0.6)
        axes.set_title(title, parse_math=False)
        figure.colorbar(drawn, cax=axes.inset_axes((1.04, 0, 0.05, 1)), label="x uniform")


def draw_evidence(figure, maps, view, grid):
    """The right. maps: L tensors (h, N-1), times uniform; a row for each block, block 1 on top."""
    L, h = len(maps), len(maps[0])
    cells = figure.add_gridspec(L, h, left=0.69, right=0.93, top=0.85, bottom=0.11, wspace=0.06,
                                hspace=0.06).subplots(squeeze=False)
    top, size = float(max(values.max() for values in maps)), max(4, min(11, 80 / L, 60 / h))
    for block in range(L):
        for head in range(h):
            drawn = show_map(cells[block, head], maps[block][head], view, grid, top)
        cells[block, 0].set_ylabel(f"block {block + 1}", fontsize=size)
    for head in range(h):
        cells[0, head].set_title(f"head {head + 1}", fontsize=size)
    figure.colorbar(drawn, cax=figure.add_axes((0.94, 0.11, 0.008, 0.74)), label="x uniform")


def draw_picture(path, photo, view, model, mean, std, classes, target=None, truth=""):
    """Look at one image, an RGB PIL image, through `view`, the same after `fit`; write a PNG.

    `target` is the class whose relevance is drawn, by default the most probable; `truth` the name
    of the right one, if it is known.
    """
    images = normalise(pil_to_tensor(view)[None], mean, std)            # (1, C, S, S)
    with torch.inference_mode():
        logits, attention = model(images, return_attention=True)
    probabilities = logits[0].softmax(dim=0).tolist()                   # K numbers
    order = logits[0].argsort(descending=True).tolist()
    bars = [(classes[i], probabilities[i]) for i in order[:5]]
    c = order[0] if target is None else target
    maps = {f"CLS attention, block {len(attention)}, all heads": attention[-1].mean(1)[0, 0, 1:],
            f"rollout, blocks 1 to {len(attention)}": attention_rollout(attention)[0],
            f"relevance for {classes[c][:16]} ({probabilities[c]:.0%})":
            relevance(model, images, c)[0]}
    figure = Figure(figsize=(16, 9), dpi=100)
    maps = {title: times_uniform(values) for title, values in maps.items()}
    draw_answer(figure, photo, truth, view, bars, maps, model)
    draw_evidence(figure, [times_uniform(A[0, :, 0, 1:]) for A in attention], view, model.grid)
    figure.text(0.02, 0.93, "The answer", fontsize=17, weight="bold")
    figure.text(0.665, 0.93, "CLS attention, every block and head", fontsize=17, weight="bold")
    figure.text(0.02, 0.04, "1 x uniform: no preference.   Attention is where information flowed, "
                "no proof of why the model answers as it does (Jain and Wallace, 1902.10186).")
    with whole_file(path) as file:
        figure.savefig(file, format="png")


# What the model learnt, in three pictures (paper, figure 7). Left, the first 28 principal
# components of what E looks for in a patch; expect smooth waves and opposed colours. Middle, how
# alike the vectors of the places are. Here they began so, each like its neighbours; see what
# training made of it. Right, how far each head looks: the mean distance from a patch to those it
# reads, weighted by attention. Expect near and far side by side in the first blocks, where a
# convolution has only near. (All this after many epochs of photographs; a few epochs leave most of
# it as it began, and the filters as random numbers.)

def attention_distance(attention, grid, patch_size):
    """How far every head looks, in pixels. attention: L tensors (B, h, N, N); returns (L, h)."""
    rows, cols = grid
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).float()       # (N-1, 2)
    far = patch_size * torch.cdist(places, places)                              # (N-1, N-1)
    patches = [A[:, :, 1:, 1:] / A[:, :, 1:, 1:].sum(dim=-1, keepdim=True) for A in attention]
    return torch.stack([(A * far).sum(dim=-1).mean(dim=(0, 2)) for A in patches])   # (L, h)


def draw_learnt(path, model, images):
    """Filters, positions and distances of a model, over images (B, C, S, S), normalised; a PNG."""
    E = model.patch_embed.proj.weight.detach()                          # (D, C, P, P)
    waves = torch.linalg.svd((E - E.mean(dim=0)).flatten(1), full_matrices=False).Vh[:28]
    waves = waves / waves.abs().amax(dim=1, keepdim=True) / 2 + 0.5     # (up to 28, C*P*P)
    waves = make_grid(waves.reshape(-1, *E.shape[1:]), nrow=7, padding=1, pad_value=1)
    places = F.normalize(model.pos_embed.detach()[0, 1:], dim=1)        # (N-1, D)
    alike = (places @ places.T).reshape(-1, 1, *model.grid)             # (N-1, 1, rows, cols)
    alike = make_grid(alike, nrow=model.grid[1], padding=1, pad_value=torch.nan)
    with torch.inference_mode():
        attention = model(images, return_attention=True)[1]
    reach = attention_distance(attention, model.grid, model.config.patch_size)  # (L, h)
    figure = Figure(figsize=(16, 5.4), dpi=100, layout="constrained")
    filters, positions, distances = figure.subplots(1, 3)
    filters.imshow(waves.permute(1, 2, 0).numpy())
    filters.set_title("patch filters: principal components")
    shown = positions.imshow(alike[0].numpy(), interpolation="nearest")
    positions.set_title("cosine similarity of each place with all places")
    figure.colorbar(shown, ax=positions, shrink=0.8)
    for block, heads in enumerate(reach.tolist()):
        distances.plot([block + 1] * len(heads), heads, "o", color="tab:blue")
    even = attention_distance([torch.ones_like(attention[0])], model.grid, model.config.patch_size)
    distances.axhline(even[0, 0].item(), color="gray", ls="--", label="attention to all alike")
    distances.set(title="how far each head looks", xlabel="block", ylabel="mean distance, pixels",
                  xticks=range(1, len(reach) + 1), ylim=(0, 1.5 * even[0, 0].item() or 1))
    distances.legend()
    for axes in (filters, positions):
        axes.axis("off")
    with whole_file(path) as file:
        figure.savefig(file, format="png")


# ---- 10. The command line ------------------------------------------------------------------------
#
# The options of `train` are the fields of the two configurations. argparse leaves out what was not
# typed (SUPPRESS), so that no default hides what a checkpoint or a variant says.

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message}; see python {self.prog} --help")


def make_parser():
    parser = Parser(prog="vit.py", allow_abbrev=False,
                    description="Train a Vision Transformer, and see what it looks at.")
    parser.add_argument("--version", action="version", version=f"vit.py {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,eval,viz}")
    train_parser = commands.add_parser("train", help="train a model", allow_abbrev=False)
    for name, cls in (("training", TrainConfig), ("model", ViTConfig)):    # the last has --variant
        group = train_parser.add_argument_group(name)
        for f in (f for f in fields(cls) if f.metadata):
            takes = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(
                type=f.type, choices=f.metadata["choices"],
                metavar=None if f.metadata["choices"] else f.type.__name__.upper())
            group.add_argument(
                "--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **takes,
                help=f"{f.metadata['help']} (default: {f.default or repr(f.default)})")
    group.add_argument("--variant", choices=VARIANTS, default=argparse.SUPPRESS,
                       help="a size by name: sets dim, depth and num-heads, no more")
    eval_parser = commands.add_parser("eval", help="test it, class by class", allow_abbrev=False)
    viz_parser = commands.add_parser("viz", help="see what it looks at", allow_abbrev=False)
    for p in (eval_parser, viz_parser):
        p.add_argument("--ckpt", required=True, metavar="FILE", help="what train wrote")
        p.add_argument("--data", help="where test images are (default: what it was trained on)")
    viz_parser.add_argument("--image", nargs="+", action="extend", default=[], metavar="IMAGE",
                            help="image files; test:7 is the eighth test image of its data; none "
                            "at all: what the model learnt, its filters, positions and distances")
    viz_parser.add_argument("--target", metavar="CLASS",
                            help="for the relevance map of IMAGE (default: the most probable)")
    viz_parser.add_argument("--out", metavar="FILE", help="the picture, if it is one (default, in "
                            "the folder you are in: IMAGE_attention.png, learnt.png)")
    return parser


def memory_is_full(error):
    """Each device says it in its own words."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in str(error) for words in ("out of memory", "allocate memory", "not enough memory"))


# A resumed run is the same run: only where things lie, what computes it, and its length may change.
# It may grow longer. That stretches the schedule, so after a finished run the learning rate jumps
# up again, and it raises the share of strong augmentation.

RESUME_MAY_CHANGE = ("resume", "out", "epochs", "data", "device", "compile")


def run_train(typed):
    sizes = VARIANTS.get(typed.pop("variant", None), ())
    options, checkpoint = dict(zip(("dim", "depth", "num_heads"), sizes)) | typed, None
    if "resume" in typed:
        checkpoint = load_checkpoint(typed["resume"])
        before = asdict(checkpoint["vit"]) | asdict(checkpoint["train"])
        other = [f"--{name.replace('_', '-')} is {before[name]}" for name in sorted(options)
                 if name not in RESUME_MAY_CHANGE and options[name] != before[name]]
        if other:
            raise InputError(f"--resume goes on with the same run, in which {', '.join(other)}; "
                             f"leave out what differs, or start a new run")
        options = before | {"out": typed["resume"]} | options
    vit, config = (cls(**{f.name: options[f.name] for f in fields(cls) if f.name in options})
                   for cls in (ViTConfig, TrainConfig))
    check_output(config.out, ".pt", ".csv", ".png")
    if checkpoint and config.epochs < max(checkpoint["epoch"] + 1, checkpoint["train"].epochs):
        raise InputError(f"{config.resume} has had {checkpoint['epoch']} of "
                         f"{checkpoint['train'].epochs} epochs; it cannot be made shorter, and to "
                         f"go on after its end it needs more --epochs")
    run = None
    try:
        run, data, dtype = prepare(config, vit, checkpoint)
        train(run, data, config, dtype)
    except KeyboardInterrupt:
        saved = config.out if run and run.saved else config.resume
        say(f"stopped; go on with: python vit.py train --resume {shlex.quote(saved)}" if saved else
            "stopped in the first epoch; nothing is saved yet")
        raise
    except RuntimeError as error:
        if memory_is_full(error):
            half = max(1, config.batch_size // 2)
            raise InputError(f"--batch-size {config.batch_size} does not fit in memory; try a new "
                             f"run with --batch-size {half}, or with a smaller model") from None
        if config.compile:
            raise InputError(f"--compile does not work here ({str(error).splitlines()[0]}); leave "
                             f"it out, or install a C++ compiler") from None
        raise
    say(f"test accuracy {run.history[-1]['test_accuracy']:.2%} after epoch {config.epochs}\n"
        f"wrote {config.out}, with its log (.csv) and curves (.png)\n"
        f"next: python vit.py viz --ckpt {config.out} --image test:0")


def read_picture(name, checkpoint, data):
    """An image file, or "test:7" of the data: an RGB PIL image, and its class if that is known."""
    if not name.startswith("test:"):
        return open_image(name, tuple(round(255 * value) for value in checkpoint["mean"])), ""
    images, classes = open_split(data, "test", checkpoint["vit"].image_size)
    index = name.removeprefix("test:")
    if not index.isdecimal() or len(index) > 9 or int(index) >= len(images):
        raise InputError(f"--image {name} is none of test:0 to test:{len(images) - 1}")
    photo, label = images[int(index)]
    return photo, classes[label]


def restore_model(path):
    """A checkpoint and its model, in eval mode; mean and std as (C, 1, 1)."""
    checkpoint = load_checkpoint(path)
    model = make_model(checkpoint["train"].model, checkpoint["vit"]).eval()
    model.load_state_dict(checkpoint["model"])
    mean, std = (torch.tensor(checkpoint[name])[:, None, None] for name in ("mean", "std"))
    return checkpoint, model, mean, std


def run_eval(typed):
    checkpoint, model, mean, std = restore_model(typed["ckpt"])
    device, name = pick_device("auto"), typed["data"] or checkpoint["train"].data
    pictures, classes = open_split(name, "test", checkpoint["vit"].image_size)
    if classes != checkpoint["classes"]:
        raise InputError(f"--data {name} has other classes than the checkpoint, whose are "
                         f"{', '.join(checkpoint['classes'])}; rename the folders")
    images, labels = decode(pictures, checkpoint["vit"].image_size, device)
    dtype = pick_precision(checkpoint["train"].amp, device)
    guess = predict(model.to(device), images, mean.to(device), std.to(device), dtype).argmax(dim=1)
    K = len(classes)
    table = torch.bincount(labels * K + guess, minlength=K * K).reshape(K, K)   # row: true class
    right = (guess == labels).float().mean()
    say(f"test accuracy {right:.2%} on {len(labels):,} images of {name}\n\naccuracy  class")
    for i in range(K):
        say(f"{table[i, i] / table[i].sum().clamp(min=1):8.1%}  {classes[i]}")
    say("\nmistakes  the most frequent")
    for i in table.fill_diagonal_(0).flatten().topk(min(5, K)).indices.tolist():
        if count := table[i // K, i % K].item():
            say(f"{count:8}  {classes[i // K]} taken for {classes[i % K]}")


def run_viz(typed):
    checkpoint, model, mean, std = restore_model(typed["ckpt"])
    if checkpoint["train"].model != "vit":
        raise InputError(f"{typed['ckpt']} holds a {checkpoint['train'].model}: a CNN has no "
                         f"attention to draw; train without --model, or try eval")
    classes, size, target = checkpoint["classes"], model.config.image_size, typed["target"]
    data, names = typed["data"] or checkpoint["train"].data, typed["image"]
    if target is not None and (target not in classes or not names):
        raise InputError(f"--target {target} must be one of {', '.join(classes)}, with an --image")
    outs = [typed["out"] or Path(name.replace(":", "_")).stem + "_attention.png"
            for name in names] or [typed["out"] or "learnt.png"]
    files = [typed["ckpt"], *outs, *names]
    if any(same_file(a, b) for a, b in itertools.combinations(files, 2)):
        raise InputError("two of these files would be the same; give each image a call of its own, "
                         "with an --out of its own")
    for out in outs:
        check_output(out, ".png")
    if not names:
        tests = open_split(data, "test", size)[0]
        some = torch.linspace(0, len(tests) - 1, min(50, len(tests))).long().tolist()
        images = torch.stack([pil_to_tensor(fit(tests[i][0], size)) for i in some])
        draw_learnt(outs[0], model, normalise(images, mean, std))
        say(f"wrote {outs[0]}")
    for name, out in zip(names, outs):
        photo, truth = read_picture(name, checkpoint, data)
        if min(photo.size) < size:
            print(f"warning: {name} is enlarged to the {size} pixels of the model", file=sys.stderr)
        draw_picture(out, photo, fit(photo, size), model, mean, std, classes,
                     target and classes.index(target), truth)
        say(f"wrote {out}")


def main(argv=None):
    """Run the command line `argv` (default: sys.argv); returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):              # names that a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", "Glyph .* missing")       # nor the font: it draws boxes
    try:
        typed = vars(make_parser().parse_args(argv))
        {"train": run_train, "eval": run_eval, "viz": run_viz}[typed.pop("command")](typed)
        return 0
    except InputError as error:
        with suppress(InputError):
            say("", keep=False)                         # wipe the status line
        print(f"vit.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not memory_is_full(error):
            raise
        print("vit.py: memory is full; take fewer or smaller images", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:                           # --help and --version end this way
        return end.code


if __name__ == "__main__":
    sys.exit(main())
