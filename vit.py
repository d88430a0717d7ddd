"""vit.py: the Vision Transformer in one file, to be read from top to bottom, and to be run.

The six steps of Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv 2010.11929), the paper:

  1. Cut the image into square patches and turn each into a vector: a token.         Section 2
  2. Let every token gather what it needs from all the others: attention.            Section 3
  3. Let every token think about what it gathered: an MLP. Both together: a block.   Section 4
  4. Add one token that belongs to no patch, tell every token where it lies, stack
     blocks, and let a linear layer read the class from that one token.              Section 5
  5. Show it labelled images, each time a little altered, and lower its loss.    Sections 6-8
  6. Ask it where it looked.                                                         Section 9

That is Part I, the lesson. Part II, the workshop, makes it usable: 10 options, 11 images and data
sets, 12 checkpoints, 13 pictures, 14 the command line. To change the model, Part I is enough.

Commands (each has --help), with test accuracies (last epoch, seed 0, a Xeon, bf16: section 7):

  python vit.py train --data shapes --epochs 5     drawn, no download; 98.7 %, 2 minutes, two cores
  python vit.py train --data DIR --epochs 25       DIR holds CIFAR-10; 88.7 %, 116 minutes, one core
  python vit.py train --epochs 100                 CIFAR-10, the default model and recipe
  python vit.py train --resume vit.pt              continue a stopped run
  python vit.py eval --ckpt vit.pt                 test it, class by class
  python vit.py viz --ckpt vit.pt --image cat.png  what did it look at?

Left out, to stay readable: worker processes, other tasks, other models but one CNN. A comment that
begins "paper:" says where the model departs from the paper; the recipe is a later one throughout.
"""

# ================================ Part I: the lesson ==============================================

# ---- 1. Symbols and configuration ----------------------------------------------------------------
# These letters mean the same in every shape of this file:
#   B  images in a batch             N  tokens: (H/P)(W/P) patches and one class token
#   C  channels of an image          D  width: how many numbers a token has (`dim`)
#   H  height of an image, pixels    h  attention heads in a block (`num_heads`)
#   W  width of an image, pixels     d  width of one head, D / h
#   S  side of a square image        L  blocks (`depth`)
#   P  side of a patch, pixels       K  classes
#   n  images in a data set          l  a block, 1 to L
# paper: its N counts the patches only, which are N-1 here. Section 5 explains the class token.

import math, time
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.ops import StochasticDepth
from torchvision.transforms import v2

__version__ = "0.3.0"

class InputError(ValueError):
    """What the user gave cannot work. The message says why, and what can help."""

def refuse(wrong, message):
    if wrong:
        raise InputError(message)

@dataclass(frozen=True)
class ViTConfig:
    """What the model is. Raises InputError when the numbers do not fit together."""
    image_size: int = 32        # side S of the square images, in pixels
    patch_size: int = 4         # side P of a patch, in pixels
    in_channels: int = 3
    num_classes: int = 10
    dim: int = 192              # width D of a token
    depth: int = 6              # number L of blocks
    num_heads: int = 3          # attention heads h in a block
    mlp_ratio: float = 4.0      # hidden width of the MLP / dim
    dropout: float = 0.0        # share of numbers set to 0 in training
    drop_path: float = 0.0      # share of branches (section 4) left out, from 0 in block 1 to this
    pos_embed: Literal["learned", "sine", "rope", "none"] = "learned"  # how places are told apart
    stem: Literal["patch", "conv"] = "patch"    # tokens by one matrix, or by convolutions

    def __post_init__(self):
        S, P, D, h = self.image_size, self.patch_size, self.dim, self.num_heads
        refuse(S % P, f"--image-size {S} must be a multiple of --patch-size {P}")
        refuse(D % h, f"--dim {D} must be a multiple of --num-heads {h}")
        refuse(D * self.mlp_ratio < 1, f"--mlp-ratio {self.mlp_ratio} leaves nothing of --dim {D}")
        refuse(self.pos_embed == "rope" and D // h % 4,
               f"--pos-embed rope needs a --dim that is a multiple of 4 x --num-heads, not {D}")
        refuse(self.stem == "conv" and (P < 2 or P & (P - 1) or D % (P // 2)),
               f"--stem conv needs a --patch-size of 2, 4, 8, ..., and half of it to divide --dim")

# ---- 2. Patches: an image becomes tokens ---------------------------------------------------------
# A Transformer reads a list of vectors, its tokens. The obvious tokens are the pixels, but
# attention compares all with all, N x N pairs: a 224 x 224 image has 50,176 pixels, so 2.5 billion
# pairs in every block. Cut into patches of 16 x 16 it has 196 tokens and 38 thousand pairs. For
# CIFAR-10 (32 x 32) patches of 4 give 8 x 8 = 64 tokens; patches of 16 would leave only four.
#
# A patch is laid out as one row p_i, channel by channel, and a learned matrix E makes it a token:
#
#     p_i E + b,      p_i in R^(C*P*P),  E in R^(C*P*P x D),  b in R^D        (paper, eq. 1, no b)
#
# Below, E is a convolution with kernel and stride P, which is the same sum: each kernel is a column
# of E folded to (C, P, P), laid on every patch once. test_vit.py cuts by hand and finds the same.
#
# E learns every edge anew for each place it can have in a patch. `--stem conv` (2106.14881) takes
# small steps instead: 3 x 3 convolutions of stride 2, each of which halves the image, until a patch
# is one place; then E, now 1 x 1, gives the same grid of tokens. So the first few pixels are read
# as a CNN, made of convolutions, reads them (section 5): near pixels belong together; an edge is an
# edge anywhere. The price: 7 % more weights and work in the default model, no E to look at, tokens
# that see past their patch, and BatchNorm: in training it scales an image by those of its batch.
# paper: its hybrid takes the tokens from a ResNet.

class PatchEmbed(nn.Module):
    """Image to tokens, patches left to right and top to bottom: (B, C, H, W) -> (B, N-1, D)."""

    def __init__(self, config):
        super().__init__()
        side, D, width = config.patch_size, config.dim, config.in_channels
        self.stem = nn.Sequential()                             # empty: the images pass unchanged
        while config.stem == "conv" and side > 1:
            before, side = width, side // 2
            width = D // side                                   # ..., D/4, D/2, D
            self.stem.extend([                                  # no bias: BatchNorm has its own
                nn.Conv2d(before, width, kernel_size=3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(width), nn.ReLU()])
        self.proj = nn.Conv2d(width, D, kernel_size=side, stride=side)

    def forward(self, images):
        x = self.proj(self.stem(images))                        # (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2)                     # (B, N-1, D)

# ---- 3. Attention --------------------------------------------------------------------------------
# A token on a cat's ear should find out that there is another ear. So every token asks a question,
# its query q_i. It also offers an answer, its value v_j, under a heading, its key k_j. All three
# are linear maps of the token (in the code with a bias each). With one token a row, x is (N, D).
# For now there is one head, d = D, and each matrix is D x D:
#
#     q = x W_q,   k = x W_k,   v = x W_v                                        (paper, eq. 5)
#
# How well heading j fits question i is a dot product. A softmax (exp of each score over the sum of
# these) turns a query's scores into weights of sum 1; the token gets the weighted mean of values:
#
#     A = softmax( q k^T / sqrt(d) ),      output = A v                               (eq. 6, 7)
#
# The softmax runs over the keys, the last axis: row i of A says how token i shares its attention.
#
# Why sqrt(d)? If the numbers of q and k are independent, with mean 0 and variance 1, their dot
# product adds up d products and has variance d, so size sqrt(d), 8 for d = 64. The softmax of such
# scores is close to 0 or 1, its gradient close to 0, and learning slow. Divided, they have size 1.
#
# By hand, one query and three tokens, d = 4:
#
#     q = (1, 1, 1, 1)     k_1 = (0, 0, 0, 0)    k_2 = (2, 0, 0, 0)    k_3 = (2, 2, 0, 0)
#                          v_1 = (1, 0, 0, 0)    v_2 = (0, 1, 0, 0)    v_3 = (0, 0, 1, 0)
#     q.k = 0, 2, 4        over sqrt(4): 0, 1, 2      exp: 1, 2.718, 7.389, in all 11.107
#     A = .090, .245, .665                            output = (.090, .245, .665, 0)
#     Without the division: .016, .117, .867, closer to choosing a single token.
#
# Why several heads? One softmax gives one mean: it can look at the left ear and at the tail, but
# mixes what it finds. So q, k and v are cut into h pieces of d = D / h numbers, each with a softmax
# of its own, and `proj` mixes the results (eq. 8). `proj` aside, this costs as much as one head.
#
# Nothing here knows where a token lies: shuffle the tokens, and the outputs are shuffled likewise.
# (`rotate` is one way to tell the model where; it comes in section 5.) Dropout sets a random share
# of numbers to 0 in training, so that nothing hangs on one alone, and scales the rest up to match.
# paper: no dropout on the weights of attention; here there is.

class Attention(nn.Module):
    """Multi-head self-attention: (B, N, D) -> (B, N, D), and its weights (B, h, N, N)."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)        # three maps in one matrix product
        self.proj = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, return_attention=False, fused=None, rotate=None):
        """Returns the output and the softmax weights, before dropout. The fused kernel (the whole
        else-branch in one call) is fast, the default on CUDA, and returns None for the weights."""
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1)  # (B, N, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                    # each (B, h, N, d)
        if rotate:
            q, k = rotate(q), rotate(k)
        if fused is None:
            fused = x.is_cuda and not return_attention
        if fused:
            attention, drop = None, self.dropout.p * self.training
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)         # (B, h, N, d)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])   # (B, h, N, N)
            attention = scores.softmax(dim=-1)                          # (B, h, N, N)
            x = self.dropout(attention) @ v                             # (B, h, N, d)
        x = x.transpose(1, 2).reshape(B, N, D)                  # (B, N, D), heads side by side
        return self.dropout(self.proj(x)), attention

# ---- 4. MLP, drop path, block --------------------------------------------------------------------
# Attention moves information between tokens, but for given weights A it is linear: a token can mix
# "pointed" and "furry", not decide that both are there. The MLP can. It takes each token alone, all
# with the same weights: widen to four times D, to test for many features, bend each by a non-linear
# function, narrow again. Four is an old convention; it puts two thirds of a block's weights here.
#
#     MLP(x) = fc2(GELU(fc1(x))),      GELU(t) = t Phi(t)
#
# Phi(t) is the chance that a standard normal number is below t. So large t pass, and very negative
# t are stopped. It is ReLU, max(0, t), with a rounded corner: just below 0 some gradient is left.

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
# Each plus is a residual connection: a branch need only learn a correction. The sum grows with
# every block; the norm at the start of each branch still hands the branch numbers of one size.
#
# This is pre-norm. Follow a gradient back from the end: it has a direct path, through the pluses
# alone, on which nothing changes it. So every block gets that share of it whole, whatever other
# branches do. The first Transformer had post-norm, x <- norm(x + attention(x)). There the norms lie
# on that path, and each rescales the gradient once more; such models need a careful beginning.
#
# Drop path (stochastic depth, 1603.09382) leaves a branch out for some images in training, so that
# no block relies on exactly what another does, and scales up the rest, as dropout does. The rate
# rises from 0 in the first block, on which all others build, to `drop_path` in the last.
# paper: it has dropout only; drop path came to ViT with DeiT (2012.12877).

class Block(nn.Module):
    """One pre-norm block: (B, N, D) -> (B, N, D), and its attention weights."""

    def __init__(self, config, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)         # eps: no division by 0
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config)
        self.drop_path = StochasticDepth(drop_path, mode="row")     # row: for each image

    def forward(self, x, return_attention=False, rotate=None):
        out, attention = self.attn(self.norm1(x), return_attention, rotate=rotate)
        x = x + self.drop_path(out)                             # (B, N, D)
        x = x + self.drop_path(self.mlp(self.norm2(x)))         # (B, N, D)
        return x, attention

# ---- 5. The Vision Transformer -------------------------------------------------------------------
# The class token. L blocks give N tokens, but we want one answer. So one more token, a learned
# vector that is the same for every image, is put in front. In each block it gathers from the
# patches what helps to name the class. At the end it passes a last LayerNorm (eq. 4), as the sum
# itself was never normalised. Then the head, a linear layer (unrelated to the heads of attention),
# turns it into K scores, the logits, whose softmax is the probabilities. The mean of the patches,
# `self.norm(x[:, 1:].mean(dim=1))` in `forward`, does about as well (paper, D.3); but no row of
# attention would then say what the answer was gathered from. Section 9 draws that row.
#
# The positions. To attention and MLP the tokens are a heap, not a grid: a cat with its ears below
# its feet would be the same cat. So each place, and the class token, has a learned vector to add:
#
#     x = [cls; p_1 E + b; ...; p_(N-1) E + b] + E_pos,      E_pos in R^(N x D)           (eq. 1)
#
# They begin as waves along the rows and the columns. Each of D/4 frequencies f gives row r the two
# numbers sin(f r) and cos(f r), and the column likewise. Rows r and s then have the dot product
#
#     sin(f r) sin(f s) + cos(f r) cos(f s) = cos(f (r - s)),
#
# largest for r = s, and falling with the distance at first: summed over all f, near places have
# like vectors from the first step on. The waves are halved, to leave room for what the patches say.
# paper: they begin at random, and the grid must be discovered.

def sincos_positions(rows, cols, dim):
    """Waves (rows * cols, dim), float32: sin and cos of the row, of the column, and dim % 4 zeros.
    Frequencies fall from 1 towards 1/100 (in the first Transformer, 1706.03762, 1/10,000)."""
    frequency = 100 ** -(torch.arange(dim // 4) / max(1, dim // 4))         # (dim//4,)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))   # (rows*cols, 2)
    row, col = places.T[:, :, None] * frequency                     # (rows*cols, dim//4) each
    table = torch.cat([row.sin(), row.cos(), col.sin(), col.cos()], dim=1)  # dim - dim % 4 wide
    return F.pad(table, (0, dim % 4))                                       # (rows*cols, dim)

# That is `--pos-embed learned`: what a place means is left to the data. `sine` keeps the waves
# fixed, `none` leaves the heap a heap. `rope` (2104.09864) adds nothing to a token. It takes the
# numbers i and i + d/2 of a query or key as a point in a plane, and turns each about 0: half of
# them by f r in row r, half by f c in column c. Turn a query by f r and a key by f s: their dot
# product is as if the query alone were turned by f (r - s). So the score of two patches hangs on
# what they hold and on their offset alone. This suits images: eyes are above a nose wherever the
# face is; the other schemes have to learn as much. In a larger image `learned` and `sine`
# are resized; with `rope` a step is the same turn, but offsets may be longer than any before.

def rotation(rows, cols, d, device):
    """The function that turns queries or keys, (B, h, N, d) -> (B, h, N, d), in a grid."""
    waves = sincos_positions(rows, cols, d).to(device)                      # (N-1, d)
    waves = torch.cat([waves[:1], waves])   # (N, d); the class token's turn is that of (0, 0): none
    row_sin, row_cos, col_sin, col_cos = waves.chunk(4, dim=1)              # (N, d/4) each
    sin, cos = torch.cat([row_sin, col_sin], dim=1), torch.cat([row_cos, col_cos], dim=1)

    def rotate(x):
        a, b = x.chunk(2, dim=-1)                                           # (B, h, N, d/2) each
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
    return rotate

def resize_positions(pos_embed, grid, rows, cols):
    """Position vectors (1, 1 + places, D), resized like an image for another grid (paper, 3.2)."""
    if (rows, cols) == grid:
        return pos_embed
    cls, places = pos_embed[:, :1], pos_embed[:, 1:]
    places = places.transpose(1, 2).reshape(1, -1, *grid)                   # (1, D, *grid)
    places = F.interpolate(places, size=(rows, cols), mode="bicubic", antialias=True)
    return torch.cat([cls, places.flatten(2).transpose(1, 2)], dim=1)       # (1, 1 + rows*cols, D)

class ViT(nn.Module):
    """Paper, section 3.1: float images (B, C, H, W), H and W multiples of P -> logits (B, K). With
    return_attention also L tensors (B, h, N, N): the softmax weights, in the autograd graph."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        side = config.image_size // config.patch_size
        self.grid = (side, side)                                # rows and columns of patches
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + side * side, config.dim),
                                      requires_grad=config.pos_embed == "learned")
        self.dropout = nn.Dropout(config.dropout)
        rates = [config.drop_path * i / max(1, config.depth - 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.initialise()

    @torch.no_grad()
    def initialise(self):
        """How every weight begins. (LayerNorm by itself: scale 1 and shift 0.)"""
        # Deviation 1 / sqrt(m) for m inputs: from inputs of variance 1 come sums of variance 1, as
        # section 3 supposes. Pixels are normalised (section 6), so patches enter at about 1, too.
        # paper: Xavier's rule, 0 for head and class token; in pre-training a head of two layers.
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # In the stem sqrt(2 / m), as ReLU stops half of what comes (1502.01852).
        for convolution in self.patch_embed.stem[::3]:
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        # Each branch ends in zeros, so every block begins as the identity. These matrices learn all
        # the same, as their inputs are not 0; what comes before them learns from step 1 on.
        for block in self.blocks:
            nn.init.zeros_(block.attn.proj.weight)
            nn.init.zeros_(block.mlp.fc2.weight)
        nn.init.normal_(self.head.weight, std=0.02)     # small: classes are about equally likely
        nn.init.normal_(self.cls_token, std=0.02)       # in the sum, what it reads outweighs it
        nn.init.zeros_(self.pos_embed)
        # Waves have size sqrt(1/2) = 0.71 (root mean square), halved 0.35: a third of the patches.
        if self.config.pos_embed in ("learned", "sine"):
            self.pos_embed[0, 1:] = sincos_positions(*self.grid, self.config.dim) / 2

    def forward(self, images, return_attention=False):
        B, C, H, W = images.shape
        P = self.config.patch_size
        refuse(H % P or W % P, f"images of {H} x {W} pixels cannot be cut into patches of {P}")
        rows, cols = H // P, W // P
        cls = self.cls_token.expand(B, -1, -1)                          # (B, 1, D)
        x = torch.cat([cls, self.patch_embed(images)], dim=1)           # (B, N, D)
        x = self.dropout(x + resize_positions(self.pos_embed, self.grid, rows, cols))   # (B, N, D)
        rotate, attention = None, []
        if self.config.pos_embed == "rope":
            rotate = rotation(rows, cols, self.config.dim // self.config.num_heads, x.device)
        for block in self.blocks:
            x, weights = block(x, return_attention, rotate)             # (B, N, D)
            if return_attention:
                attention.append(weights)
        logits = self.head(self.norm(x[:, 0]))                          # (B, K)
        return (logits, attention) if return_attention else logits

# What it costs. In multiply-adds, a block needs 3ND^2 for q, k and v, N^2 D for the scores, N^2 D
# for the means, ND^2 for `proj` and 8ND^2 for an MLP of ratio 4: together 12ND^2 + 2N^2 D.
#
#     (side / patch)           N     D       12ND^2     2N^2 D     a block    all L blocks
#     the default, 32/4       65   192       28.8 M      1.6 M      30.4 M          0.18 G
#     ViT-B, 224/16          197   768     1394.3 M     59.6 M    1454.0 M          17.4 G
#
# So at these sizes the N^2 of attention is a small part. A block has 4D^2 + 8D^2 parameters in its
# attention and MLP, all blocks 12 L D^2. Twice the depth doubles parameters and cost, twice the
# width quadruples both; twice the tokens cost two to four times as much, for a few more positions.
#
# Why a ViT needs more data than a CNN. A CNN has two assumptions built in (its inductive bias):
# what matters is near (locality), and it looks the same wherever it lies (weight sharing). A ViT
# assumes less: how patches are cut, that the same weights treat each of them, and which are near
# (the waves). Any patch may look at any other; where to look must be learned. With hundreds of
# millions of images that freedom wins (paper, figure 3). With fifty thousand we state the
# assumptions in another form: altered copies of each image, next. To compare, `--model resnet18`
# trains a CNN (1512.03385) by AdamW: 86.4 % after 5 epochs of CIFAR-10, where the ViT has 77.5 %.

# ---- 6. Altered copies ---------------------------------------------------------------------------
# All images of a data set, for training and test, are two uint8 tensors on the device that trains
# (CIFAR-10: 184 MB), and are altered there: no worker processes to wait for, one seed for all.

@dataclass
class Data:
    """A data set, filled by section 11. mean and std: of the training pixels, scaled to 0..1."""
    images: torch.Tensor            # uint8 (n, C, S, S)
    labels: torch.Tensor            # int64 (n,)
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: list                   # K names
    mean: torch.Tensor              # (C, 1, 1)
    std: torch.Tensor               # (C, 1, 1)
    augmented: bool                 # False: images are flipped, no more
    held_out: tuple = ()            # images and labels that are set apart (section 8, `patience`)

# Each alteration makes a claim about pictures and their names. Three claim that the name stays:
#
#   - A flip, left to right: a cat in a mirror is a cat. (False for text, and for some road signs.)
#   - A shift by up to an eighth of the side, 4 pixels of 32: things need not be in the middle, nor
#     edges always at one place of a patch. The rim laid bare is filled with 0, the mean colour.
#   - A policy, TrivialAugment (2103.10158): one of fourteen operations (turn, shear, darken, ...),
#     of random strength. A tilted or darker cat is a cat; but the strongest leave little of it.
#
# The fourth, a mix of image i with the image j before it in the batch, changes the name along with
# the picture. With labels as probabilities (1 for the class, else 0), MixUp (1710.09412) makes
#
#     x = lambda x_i + (1 - lambda) x_j,      y = lambda y_i + (1 - lambda) y_j
#
# Halfway between two pictures the answer should be halfway too. CutMix (1905.04899) pastes a
# rectangle of x_j into x_i instead; lambda is the share of the area that is left to x_i, and mixes
# the labels likewise: a part that can be seen should be enough. lambda is drawn once a batch from
# Beta(alpha, alpha), from 0 to 1: evenly for alpha = 1 (CutMix), nearer the ends for 0.8 (MixUp).
#
# How much of policy and mix? In a short run a model hardly learns even the plain images; in a long
# one it would know them by heart. So they come more often the longer the run is, from never at 10
# epochs to full use at 70 (beyond 25 the rule has not been measured). In full use every image
# gets the policy and half of the batches are mixed; the other half keeps whole images in sight. In
# the last tenth of a run nothing is mixed: the model ends on images that have one label each. The
# built-in `shapes`, told apart by colour and lying everywhere already, are only flipped.

def augment_strength(epochs):
    """The share of images that get the policy, 0 to 1. The share of mixed batches is half of it."""
    return min(1.0, max(0.0, (epochs - 10) / 60))

def normalise(images, mean, std):
    """uint8 (B, C, H, W) -> float32 (B, C, H, W) of mean about 0 and deviation about 1."""
    return (images.float() / 255 - mean) / std

def shift_and_flip(x, max_shift):
    """Move each image by up to `max_shift` pixels, flip half of them: (B, C, H, W) floats. `unfold`
    lists all (2 * max_shift + 1)^2 windows of the old size in the padded image, without a copy."""
    B, _, H, W = x.shape
    x = F.pad(x, 4 * [max_shift])                       # (B, C, H + 2*max_shift, W + 2*max_shift)
    windows = x.unfold(2, H, 1).unfold(3, W, 1)         # (B, C, tops, lefts, H, W)
    top, left = torch.randint(2 * max_shift + 1, (2, B), device=x.device)   # (B,) each
    x = windows[torch.arange(B, device=x.device), :, top, left]     # (B, C, H, W): indices first
    flip = torch.rand(B, 1, 1, 1, device=x.device) < 0.5
    return torch.where(flip, x.flip(3), x)                                  # (B, C, H, W)

def augment(images, labels, data, policy_prob=0.0, mix_prob=0.0):
    """A new version of a batch: images uint8 (B, C, H, W) -> float32, labels int64 (B,). The policy
    draws one operation a call, so it is called on slices of 8 images, each with probability
    `policy_prob`. (On CUDA each call waits for the device a few times.) With probability `mix_prob`
    the batch is mixed; the labels are then float32 (B, K)."""
    if policy_prob:
        trivial = v2.TrivialAugmentWide(fill=128)                           # grey, where laid bare
        images = torch.cat([trivial(part) if torch.rand(()) < policy_prob else part
                            for part in images.split(8)])                   # (B, C, H, W)
    x = normalise(images, data.mean, data.std)
    x = shift_and_flip(x, images.shape[-1] // 8 if data.augmented else 0)   # (B, C, H, W)
    if mix_prob and torch.rand(()) < mix_prob:
        K = len(data.classes)           # one of the two, evenly; labels become (B, K)
        x, labels = v2.RandomChoice([v2.MixUp(alpha=0.8, num_classes=K),
                                     v2.CutMix(alpha=1.0, num_classes=K)])(x, labels)
    return x, labels

# ---- 7. Optimisation -----------------------------------------------------------------------------
# AdamW (1711.05101), PyTorch's, divides the running mean of each weight's gradient by its usual
# size, the root of the running mean of its square: every weight moves at about the same pace.
#
# Muon (Keller Jordan, 2024; 2502.16982) takes the gradient of a matrix as a whole. A matrix
# stretches some directions of its input more than others; by how much, its singular values say. In
# a gradient a few directions are strong and most are weak, and a plain step would learn little but
# the strong ones. Muon makes all singular values about 1, so that the weak directions are learned
# as well: G = U S V^T (as PyTorch stores it, outputs x inputs) becomes U V^T. V holds directions
# that come in, U those that go out, S how far each is stretched (singular value decomposition). To
# compute these at each step would be slow. But X X^T X = U S^3 V^T: a polynomial acts on S alone:
#
#     X <- a X + b (X X^T) X + c (X X^T)^2 X      takes each s to      a s + b s^3 + c s^5
#
# X begins as G over the root of the sum of its squares (all s^2): no s is above 1. Five rounds with
# the numbers below then bring all but the smallest s to between 0.7 and 1.2, near enough. Here G is
# not one gradient but their running mean, the newest mixed in again (Nesterov). In a tall matrix
# (rows > columns) the rows of U V^T are short: its step is sqrt(rows / columns) times as long.
# The numbers in a step are about 1 / sqrt(D), AdamW's nearer to 1, so Muon's rate is the larger.
#
# Muon gets the blocks' matrices. A vector has one singular value, its length, and nothing to even
# out: it goes to AdamW. So do `patch_embed` and `head`, which do better there in practice.

def orthogonalise(G, dtype):
    """All singular values of each matrix to about 1: (count, rows, cols), the result in `dtype`."""
    X = (G / G.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    tall = G.shape[1] > G.shape[2]
    X = X.mT if tall else X                             # X X^T is then of the smaller size
    for _ in range(5):
        XXt = X @ X.mT
        XXt = torch.baddbmm(XXt, XXt, XXt, beta=-4.7750, alpha=2.0315)  # b X X^T + c (X X^T)^2
        X = torch.baddbmm(X, XXt, X, beta=3.4445)                       # a X + (that) X
    return X.mT if tall else X

class Muon(torch.optim.Optimizer):
    """For matrices only. `dtype` is that of the products: bf16 is fast where a device has it. A
    group's `chunks` says how many maps each parameter holds: `qkv` holds three, and each is taken
    alone. Matrices of one shape are one batch: a few large products instead of many small ones."""

    def __init__(self, params, lr=0.0, weight_decay=0.0, dtype=torch.float32):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        batches = defaultdict(list)                             # by shape
        for group in self.param_groups:
            for weight, chunks in zip(group["params"], group["chunks"], strict=True):
                if weight.grad is None:
                    continue
                if weight not in self.state:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                mean = self.state[weight]["momentum_buffer"].lerp_(weight.grad, 0.05)
                G = weight.grad.lerp(mean, 0.95)
                for matrix, part in zip(weight.chunk(chunks), G.chunk(chunks)):
                    batches[matrix.shape].append((matrix, part, group))
        for (rows, cols), batch in batches.items():
            steps = orthogonalise(torch.stack([G for _, G, _ in batch]), self.dtype)
            for (matrix, _, group), step in zip(batch, steps):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(step, alpha=-group["lr"] * max(1, rows / cols) ** 0.5)

# Weight decay takes rate * decay * w off each weight w at each step, so that only what the data
# keep asking for stays large. This suits matrices, whose size is how strongly they mix. Biases and
# the scales of LayerNorm set levels; `cls_token` and `pos_embed` are inputs: all are left alone.

def layers_above(name, depth):
    """How many layers are above that of a parameter: head 0, last block 1, patches depth + 1."""
    if name.startswith("blocks."):
        return depth - int(name.split(".")[1])
    return 0 if name.startswith(("norm.", "head.")) else depth + 1

def make_optimizers(model, config, dtype=torch.float32):
    """AdamW and Muon, or AdamW alone: a list. config: Recipe (section 8). "peak": highest rate."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    qkv = {block.attn.qkv.weight for block in blocks}
    matrices = {p for name, p in model.named_parameters() if name.endswith("weight") and p.ndim > 1}
    in_blocks = matrices & {p for block in blocks for p in block.parameters()}
    groups = defaultdict(list)      # of the parameters that share optimizer, decay and rate
    for name, p in sorted(model.named_parameters(),         # the order that checkpoints rely on
                          key=lambda pair: (pair[1] not in in_blocks) + (pair[1] not in matrices)):
        muon = p in in_blocks and config.optimizer == "muon"
        peak = config.muon_lr if muon else config.lr
        share = config.layer_decay ** layers_above(name, len(blocks))   # of the rate: section 8
        if p.requires_grad:         # not: `sine`, and what is frozen
            groups[muon, p in matrices, peak * share].append(p)
    adamw, muon = ([{"params": group, "peak": peak, "weight_decay": config.weight_decay * matrix,
                     "chunks": [3 if p in qkv else 1 for p in group]}
                    for (by_muon, matrix, peak), group in groups.items() if by_muon == kind]
                   for kind in (False, True))                           # AdamW's, then Muon's
    fast = dtype if dtype == torch.bfloat16 else torch.float32          # fp16: too small a range
    return [torch.optim.AdamW(adamw)] + ([Muon(muon, dtype=fast)] if muon else [])

# The learning rate rises along a line, because at first the direction changes fast and the running
# means rest on few samples: full steps could go far in a wrong direction. Then it falls along half
# a cosine, which stays high for long and ends flat: at a constant rate the weights keep jumping
# about in the valley; small steps let them settle. A rate needs only the step: runs can resume.

def learning_rate(step, total_steps, warmup_steps, peak, final=0.0):
    """The rate at `step`, counted from 0. It is peak / (warmup_steps + 1) at step 0 and peak at
    warmup_steps. The last step, total_steps - 1, is just above final: it still does some work."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)   # from 0, below 1
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2

# Mixed precision. Products of 16-bit numbers are several times faster where the hardware has units
# for them. Under autocast the weights stay in float32, and what enters a product is rounded on the
# way. bf16 keeps the range of float32 with fewer digits and needs no further care. fp16 has more
# digits but a small range, in which small gradients would become 0. So a scaler multiplies the loss
# by a large factor, 65,536 at first, and after the backward pass divides the gradients by it. A
# step that overflows is skipped and halves the factor; it grows again with time.
#
# Clipping. Now and then a batch has a gradient many times longer than usual, which would rule the
# running means for many steps. So the gradient of all parameters together is shortened to `clip`
# where it is longer; the scaler's factor must come off first, or all would be shortened.
#
# Two optimizers, one scaler. The scaler notes for each optimizer whether its gradients were finite,
# and would let the other step. But clipping divides all gradients by one length: a single NaN in
# Muon's makes that length NaN, and with it AdamW's gradients. So with fp16 both step or neither.

def update(loss, model, optimizers, scaler, clip):
    """One step of all optimizers; returns the gradient's length. Without fp16 the scaler is off."""
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not scaler.is_enabled() or grad_norm.isfinite():     # asking waits for the GPU: fp16 only
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    return grad_norm

# ---- 8. Training ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Each number is a default of the command line."""
    epochs: int = 100               # passes over the training images
    batch_size: int = 128           # images in a step
    optimizer: Literal["muon", "adamw"] = "muon"    # muon: for the blocks' matrices alone
    muon_lr: float = 0.006          # peak learning rate of Muon
    lr: float = 1e-3                # peak learning rate of AdamW
    weight_decay: float = 0.05      # pull of the matrices to 0
    warmup: float = 0.1             # share of the run in which the rate rises
    label_smoothing: float = 0.1    # share of a target that is spread over all classes
    clip: float = 1.0               # largest length of the gradient
    freeze: int = 0                 # so many blocks, and all before them, keep their weights
    layer_decay: float = 1.0        # rate of a layer / rate of the layer above it
    patience: int = 0               # end after so many epochs with no lower held-out loss; 0: off
    seed: int = 0                   # fixes all that is random

# The loss is the cross-entropy, -ln of the probability that the model gives to the right class: 0
# if it is certain and right, ln K if it has no idea. So the first loss is about ln K, 2.30 for
# ten classes, as the head begins near 0. In training the target is softened: 0.9 for the right
# class and 0.1 spread over all, itself too (label smoothing). Against a hard target a model is
# never done: it can always lower its loss by driving the logits of what it knows further apart.
# What counts in the end is the accuracy: how often the most probable class is the right one, on
# images that were never trained on, without dropout and drop path (`model.eval()`).

@torch.inference_mode()
def predict(model, images, mean, std, dtype, batch_size):
    """The logits (n, K), float32, of images uint8 (n, C, H, W)."""
    model.eval()
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        logits = [model(normalise(batch, mean, std)) for batch in images.split(batch_size)]
    return torch.cat(logits).float()                                            # (n, K)

def evaluate(model, data, dtype, batch_size, part=()):
    """Mean cross-entropy and accuracy (0 to 1) on the test images or another part: two floats."""
    images, labels = part or (data.test_images, data.test_labels)
    logits = predict(model, images, data.mean, data.std, dtype, batch_size)             # (n, K)
    correct = logits.argmax(dim=1) == labels                                            # (n,)
    return F.cross_entropy(logits, labels).item(), correct.float().mean().item()

# Fine-tuning (`--init`; paper, section 3.2). A model that assumes little must see much. But fur is
# fur in all photographs, wheels are wheels: who has a hundred begins from what was learned from a
# million others, and goes on at small rates. Two things change. For another grid the positions are
# resized like an image: near stays near. The head begins anew: its rows stood for the old classes.
#
# Lower layers hold what is general, upper ones what the old classes asked for. So rates may fall
# from the head down (`--layer-decay`), or lower blocks stay as they are (`--freeze`): below the
# first block that learns no gradient is computed, and gradients are two thirds of the work.
#
# Few images are soon known by heart. `--patience` sets a tenth of them apart, ends the run when the
# loss on these no longer falls, and keeps the weights of its lowest point. The price: the cosine is
# cut off while the rate is high. A run of as many `--epochs` as it took, on all images, is better.

# Now the epoch. A `Run` (section 12) holds what changes while training: model, optimizers, scaler,
# and the history, a dict of figures for each epoch. The random numbers depend on seed, epoch and
# process alone: resumed after epoch 3, a run draws in epoch 4 what it would have drawn anyway. To
# read the loss is to wait for a GPU. So there it is read at every twentieth step only, and checked:
# once it is not finite, all further steps are wasted. `log` (section 10) prints the status line;
# that of step 21 stays, to tell early how long the run will take.
#
# Several GPUs. `torchrun --nproc-per-node M` starts M processes, each with the model on its own
# device and every M-th image of a batch. DistributedDataParallel averages the gradients over them
# in `backward`: shares are equal, so it is the whole batch's gradient (BatchNorm aside); the models
# stay equal. The order of the images must be the same in all, or an epoch would show some twice,
# others never. The numbers drawn after the order must differ, or all shares are altered alike.

def train_epoch(run, data, config, dtype):
    """One pass over the training images in a new order: mean loss, accuracy, images a second."""
    epoch, device, B = len(run.history), data.images.device, config.batch_size
    rank, count = processes()           # which of how many this one is; 0 of 1 without torchrun
    torch.manual_seed(seed := config.seed + 1_000_003 * (epoch + 1))  # + 1: `seed` drew the weights
    order = torch.randperm(len(data.images), device=device)
    if rank:
        torch.manual_seed(seed + rank)
    model = DistributedDataParallel(run.model) if count > 1 else run.model
    run.model.train()
    if config.freeze:
        run.model.patch_embed.eval()    # BatchNorm in a frozen stem keeps its means as well
    steps = len(order) // B             # the few images that fill no batch wait for another epoch
    total_steps, total = config.epochs * steps, torch.zeros(2, device=device)
    policy_prob = augment_strength(config.epochs) if data.augmented else 0.0
    mix_prob = policy_prob / 2 if epoch < 0.9 * config.epochs else 0.0
    begun = time.perf_counter()
    for i in range(steps):
        step = epoch * steps + i
        for group in (g for optimizer in run.optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(step, total_steps, round(config.warmup * total_steps),
                                        group["peak"])
        batch = order[i * B + rank:(i + 1) * B:count]                       # (B / count,)
        x, labels = augment(data.images[batch], data.labels[batch], data, policy_prob, mix_prob)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(x)                                               # (B / count, K)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        update(loss, run.model, run.optimizers, run.scaler, config.clip)
        if labels.ndim == 2:            # mixed: the right answer is the class with the larger part
            labels = labels.argmax(dim=1)                                   # (B / count,)
        total += torch.stack([loss.detach(), (logits.argmax(dim=1) == labels).float().mean()])
        if device.type == "cpu" or i % 20 == 0 or i + 1 == steps:
            pace = (time.perf_counter() - begun) / (i + 1)                  # seconds a step
            figures = total / (i + 1) / count
            if count > 1:
                distributed.all_reduce(figures)                             # the sum
            mean_loss, accuracy = figures.tolist()
            refuse(not math.isfinite(mean_loss),
                   f"the training loss is {mean_loss} at step {step}; {ADVICE}")
            log(f"epoch {epoch + 1}/{config.epochs}  step {i + 1}/{steps}  loss {mean_loss:.3f}  "
                f"rate {group['lr']:.1e}  {B / pace:,.0f} images/s  "    # the last group's: Muon's
                f"{pace * (total_steps - step - 1) / 60:.1f} min left", status=step != 20)
    return mean_loss, accuracy, B / pace

# The epochs. After each, the model is tested and `save_run` (section 12) writes it: always the last
# epoch. To keep the best would be to choose by the test images, which would no longer be unseen.
# (With `--patience`, `chosen` names the best on held-out images.) The two losses of the log do not
# compare: that of training is taken on altered images, while the model learns, with smoothing.

def train(run, data, config, dtype):
    """The epochs that are left, with a test and a checkpoint after each."""
    formats = ("5", "10.4f", "8.2%", "9.4f", "8.2%", "8,.0f", "7,.0f", "8.4f", "8.2%")
    log("epoch  train_loss  accuracy  test_loss  accuracy  images/s  seconds"
        + "  val_loss  accuracy" * bool(config.patience))
    for epoch in range(len(run.history) + 1, config.epochs + 1):
        row, start = {"epoch": epoch}, time.perf_counter()
        row["train_loss"], row["train_accuracy"], speed = train_epoch(run, data, config, dtype)
        row["test_loss"], row["test_accuracy"] = evaluate(run.model, data, dtype, config.batch_size)
        refuse(not math.isfinite(row["test_loss"]), f"the test loss is not finite; {ADVICE}")
        row |= {"images_per_second": speed, "seconds": time.perf_counter() - start}
        if config.patience:
            row["val_loss"], row["val_accuracy"] = evaluate(run.model, data, dtype,
                                                            config.batch_size, data.held_out)
        run.history.append(row)
        best = chosen(run.history)["epoch"]
        if config.patience and best == epoch:
            run.best = deepcopy(run.model.state_dict())
        if processes()[0] == 0:
            save_run(run, config, data)
        log("  ".join(map(format, row.values(), formats)))
        if config.patience and epoch - best >= config.patience:
            break

# ---- 9. Seeing: attention, rollout, relevance ----------------------------------------------------
# Where did the model look? Three answers, each of which takes in more than the last. They use the
# weights A of section 3, (B, h, N, N) for every block, and give a number for every patch. The
# first, CLS attention, is what the class token (CLS, token 0) took from each patch in block l: the
# row A_l[:, head, 0, 1:] of each head. But the patches had themselves read others in blocks before.
#
# Rollout (Abnar and Zuidema, 2005.00928) follows that back. It assumes that half of what leaves a
# block came through the residual connection and half through attention:
#
#     A'_l = 1/2 (mean of A_l over heads) + 1/2 I,      R = A'_L ... A'_2 A'_1
#
# I is the identity: each token takes half from itself. Later blocks are on the left, as matrices
# act on what stands to their right. Row i of R sums to 1 and says, on that assumption, of which
# input tokens output token i is made.
#
# By hand, two blocks, one head, the tokens CLS, 1 and 2. In block 1 both patches look at patch 2,
# in block 2 the class token looks at patch 1:
#
#            1 0 0              0 1 0               1  0  0               .5 .5 0
#     A_1 =  0 0 1       A_2 =  0 1 0       A'_1 =  0 .5 .5       A'_2 =   0  1 0
#            0 0 1              0 0 1               0  0  1                0  0 1
#     row 0 of R = .5 (1, 0, 0) + .5 (0, .5, .5) = (.5, .25, .25)
#
# So patch 2 gets its part, though the class token never looked at it. Left out are the values, the
# MLPs and the head: the map is the same for every class.

def rollout_matrix(attention):
    """attention: L tensors (B, h, N, N), block 1 first; returns R (B, N, N), rows sum to 1."""
    R = identity = torch.eye(attention[0].shape[-1], device=attention[0].device)
    for A in attention:
        R = ((A.mean(dim=1) + identity) / 2) @ R                        # (B, N, N)
    return R

def attention_rollout(attention):
    """Of which patches the class token is made in the end: (B, N-1)."""
    return rollout_matrix(attention)[:, 0, 1:]

# Relevance (Chefer, Gur and Wolf, 2103.15679) asks about one class c. The gradient of its logit y_c
# with respect to a weight of attention says whether more of it would raise the logit. Gradient
# times weight, cut off below 0, is taken as the evidence that flowed there. The cut comes before
# the mean over heads, or a head that speaks against the class would silence one that speaks for it:
#
#     G_l = mean over heads of max(0, dy_c/dA_l * A_l), number by number
#     R = I;  then R <- R + G_l R for l = 1 ... L
#
# In R + G_l R, the R alone is the residual connection. Through the gradient, values, MLPs and head
# count, so only this one of the three maps can tell classes apart. It sees no evidence against one.

def relevance_matrix(attention, gradients):
    """attention, gradients: L tensors (B, h, N, N), block 1 first; returns R (B, N, N)."""
    R = torch.eye(attention[0].shape[-1], device=attention[0].device)
    for A, gradient in zip(attention, gradients, strict=True):
        R = R + (gradient * A).clamp(min=0).mean(dim=1) @ R             # (B, N, N)
    return R

def relevance(model, images, target):
    """How much each patch speaks for a class: (B, N-1) float32, unscaled. images (B, C, H, W) from
    `normalise`; target: a class index, or int64 (B,). In float32 and eval mode, on a copy."""
    model = deepcopy(model).float().eval()
    images = images.detach().float().requires_grad_()       # a graph, even for a frozen model
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        logits, attention = model(images, return_attention=True)
    target = torch.as_tensor(target, device=images.device).expand(len(images))
    total = logits.gather(1, target[:, None]).sum() # images do not mix: each keeps its own gradient
    gradients = torch.autograd.grad(total, attention)
    return relevance_matrix([A.detach() for A in attention], gradients)[:, 0, 1:]

# What no such map can prove is why the model answered as it did (Jain and Wallace, 1902.10186).
# Take two heads that put all their attention on one patch. One adds the value found there to the
# class token, the other subtracts it: every map is high there, yet the patch moves no logit. Or
# take a patch of sky in which an earlier block stored what it found elsewhere: where something is
# read is not always where it was seen. To test a map, change the image there and watch the logits.
#
# The last measure is taken over many images: how far does each head look? It is the mean distance
# from a patch to the patches it reads, weighted by attention (paper, figure 7). Expect near and
# far side by side in the first blocks, where a convolution has only near.

def attention_distance(attention, grid, patch_size):
    """How far every head looks, in pixels. attention: L tensors (B, h, N, N); returns (L, h)."""
    rows, cols = (torch.arange(side, device=attention[0].device) for side in grid)
    places = torch.cartesian_prod(rows, cols).float()                           # (N-1, 2)
    far = patch_size * torch.cdist(places, places)                              # (N-1, N-1)
    patches = [A[:, :, 1:, 1:] / A[:, :, 1:, 1:].sum(dim=-1, keepdim=True) for A in attention]
    return torch.stack([(A * far).sum(dim=-1).mean(dim=(0, 2)) for A in patches])   # (L, h)

# ================================ Part II: the workshop ===========================================

# ---- 10. Options ---------------------------------------------------------------------------------

import argparse, contextlib, io, itertools, os, pickle, re, shlex, shutil, sys, warnings, zipfile
from pathlib import Path

from matplotlib import cm, colors
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torchvision import datasets, models
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

@dataclass(frozen=True)
class TrainConfig(Recipe):
    """A run: the recipe, where things lie, and what computes them."""
    data: str = "cifar10"   # cifar10, shapes (built in), or a folder: train/CLASS/*, test/CLASS/*
    model: Literal["vit", "resnet18"] = "vit"   # resnet18: a CNN to compare it with
    out: str = "vit.pt"     # checkpoint; log (.csv) and curves (.png) go beside it
    resume: str = ""        # a checkpoint whose run is to go on; its settings are kept
    init: str = ""          # weights to begin from: a checkpoint, or of timm, DeiT, torchvision
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of them that is there
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"  # precision of products; auto: a fast one
    compile: bool = False   # have torch.compile build faster code first (worth it on a GPU)

FROM_1 = ("image_size", "patch_size", "dim", "depth", "num_heads", "epochs", "batch_size")
SHARES = ("dropout", "drop_path", "warmup", "label_smoothing")      # below 1, or nothing is left
SIZES = ("dim", "depth", "num_heads", "patch_size")
VARIANTS = {"cifar": (192, 6, 3, 4), "Ti/16": (192, 12, 3, 16), "S/16": (384, 12, 6, 16),
            "B/16": (768, 12, 12, 16), "L/16": (1024, 24, 16, 16)}
FINE_TUNE = dict(optimizer="adamw", lr=3e-4, muon_lr=6e-4, layer_decay=0.75)    # with --init
ADVICE = "nothing of this epoch is saved. Try a lower --lr and --muon-lr, or --amp off"

def processes():
    """The number of this process, and how many there are: 0 and 1 without torchrun."""
    env = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
    return int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))

def log(text, status=False, error=False):
    """Print a line, in the first process; a status on terminals only, for the next to overwrite."""
    stream = sys.stderr if error else sys.stdout
    width = shutil.get_terminal_size().columns - 1 if stream and stream.isatty() else 0
    if error or processes()[0] == 0:
        wipe = "\r" + " " * width + "\r" if width else ""       # old consoles know no escapes
        print(wipe + (text[:width] if status else text + "\n"), end="", file=stream, flush=True)

def pick_device(name):
    there = torch.cuda.is_available() * ["cuda"] + torch.backends.mps.is_available() * ["mps"]
    refuse(name not in ("auto", "cpu", *there), f"--device {name}: PyTorch sees no such device")
    return torch.device([*there, "cpu"][0] if name == "auto" else name)

def pick_precision(amp, device):
    """The dtype of matrix products: what `amp` names; for "auto", bf16 or fp16 where it is fast."""
    if amp == "auto" and device.type == "cuda":
        amp = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    elif amp == "auto":
        can = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
        amp = "bf16" if can.get("amx_bf16") or can.get("avx512_bf16") else "off"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}[amp]

# ---- 11. Images and data sets --------------------------------------------------------------------

def open_image(path):
    """An image file as an RGB PIL image, upright as the camera noted it, and grey where it is
    transparent; of an animation the first frame. Raises InputError if it cannot be read."""
    try:
        with Image.open(path) as file:
            if getattr(file, "n_frames", 1) > 1 and file.format != "MPO":   # MPO: a phone's photo
                log(f"note: {path} holds {file.n_frames} pictures; the first is used", error=True)
            image = ImageOps.exif_transpose(file)
        refuse(image.mode == "F", "its numbers are no grey values of 8 or 16 bits")
        if image.mode[0] == "I":                    # 16 bits of grey: convert() would cut off 255
            image = image.convert("I")
            scale = 255 / (65535 if image.getextrema()[1] > 4095 else 4095)     # X-rays: 12 bits
            image = image.point(lambda value: value * scale + 0.5).convert("L")
        if image.has_transparency_data:
            grey = Image.new("RGBA", image.size, "gray")
            image = Image.alpha_composite(grey, image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:          # on foreign bytes, decoders raise errors of every kind
        raise InputError(f"{path} cannot be read as an image ({error}); try it as PNG") from None

def center_crop(image, size):
    """The largest square in the middle of a PIL image, resized to `size` x `size` pixels."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)

# The data set `shapes`: a coloured disc or ring over clouds and a grey one that means nothing. We
# know which pixels carry the answer, so that attention maps can be checked (test_vit.py).

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
    """n images, uint8 (n, 3, S, S), the same for the same seed; labels, int64 (n,), which go round
    the ten classes; and the pixels of the coloured figures, bool (n, S, S)."""
    generator, S = torch.Generator().manual_seed(seed), image_size
    images, masks, labels = [], [], torch.arange(n) % len(SHAPE_CLASSES)
    colours = torch.tensor(list(COLOURS.values())).float()
    for label in labels:
        clouds = 80 + 90 * torch.rand(1, 1, 5, 5, generator=generator)
        image = F.interpolate(clouds, (S, S), mode="bilinear", align_corners=True)  # (1, 1, S, S)
        image = image[0].repeat(3, 1, 1)                                            # (3, S, S)
        ring, grey = torch.rand(2, generator=generator)
        image[:, draw_figure(ring < 0.5, S, generator)] = 40 + 180 * grey
        masks.append(draw_figure(label % 2 == 1, S, generator))             # on top, never hidden
        image[:, masks[-1]] = colours[label // 2][:, None]
        image += 10 * torch.randn(image.shape, generator=generator)
        images.append(image.clamp(0, 255).to(torch.uint8))
    return torch.stack(images), labels, torch.stack(masks)

SUFFIXES = {*datasets.folder.IMG_EXTENSIONS, ".avif", ".gif", ".ico", ".jfif", ".jp2", ".tga"}
TEST_NAMES = ["test", "val", "valid", "validation"]

def folders(path):
    """Those in a folder; hidden ones belong to some program, not to the data."""
    return sorted(p for p in Path(path).glob("[!.]*") if p.is_dir() and p.name != "__MACOSX")

def open_folder(data, split):
    """{class: [image files]} of one part of a folder, "train" or "test". If it is not divided,
    every fifth file of a class is for the test; split="any" then takes all."""
    inside = {path.name.lower(): path for path in folders(data)}
    names = ["train"] if split == "train" else TEST_NAMES
    part = next(filter(folders, filter(None, map(inside.get, names))), None)
    refuse(not data or not inside or not part and inside.keys() & {"train", *TEST_NAMES},
           f"no {data}/{names[0]}/CLASS is there; --data takes cifar10, shapes, or a folder with "
           f"train/CLASS/* and test/CLASS/* (or val), or CLASS/* alone")
    classes, others, first = {}, [], part or split != "train"   # of two calls for one folder
    for folder in folders(part or data):
        files = sorted(path for path in folder.rglob("[!.]*") if path.is_file()
                       and "/." not in path.relative_to(data).as_posix())
        images = [file for file in files if file.suffix.lower() in SUFFIXES]
        others += [f.suffix or f.name for f in files if f.suffix.lower() not in SUFFIXES]
        classes[folder.name] = [image for i, image in enumerate(images) if part or split == "any"
                                or (split == "test") == (i % 5 == 0)]
        refuse(not classes[folder.name], f"{folder} holds too few images; fill or remove it")
    if others and first:
        log(f"note: {len(others):,} files of {part or data} are skipped, as no images that can be "
            f"opened ({', '.join(sorted(set(others))[:5])})")
    if first and not part:
        log(f"note: {data} is undivided; every {'fifth ' * (split == 'test')}image is for testing")
    return classes

def open_split(data, split, image_size):
    """One part of `data`: a sequence of (PIL image or file, label), and the classes' names."""
    if data == "shapes":
        refuse(image_size > 256, f"--data shapes goes up to --image-size 256, not {image_size}")
        part, seed = ("train", 0) if split == "train" else ("test", 1)
        images, labels, _ = make_shapes(SHAPE_COUNTS[part], image_size, seed)
        return [(to_pil_image(x), y) for x, y in zip(images, labels.tolist())], SHAPE_CLASSES
    if data == "cifar10":
        try:
            images = datasets.CIFAR10("data", train=split == "train", download=True)
            return images, images.classes
        except Exception as error:              # of the disk, the network, or a damaged archive
            raise InputError(f"CIFAR-10 could not be fetched or is damaged ({error}); put the file "
                             f"{datasets.CIFAR10.url} into the folder data") from None
    classes = open_folder(data, split)
    return [(f, label) for label, name in enumerate(classes) for f in classes[name]], list(classes)

def decode(pictures, image_size, device):
    """Pairs (PIL image or file, label) as tensors: uint8 (n, 3, S, S), int64 (n,)."""
    n, labels, unreadable = len(pictures), [], []
    gib = n * 3 * image_size**2 / 2**30
    refuse(gib > 16, f"{gib:.0f} GiB of images are more than 16; a smaller --image-size needs less")
    images = torch.empty(n, 3, image_size, image_size, dtype=torch.uint8)
    for i, (picture, label) in enumerate(pictures):
        labels.append(label)
        try:
            picture = open_image(picture) if isinstance(picture, Path) else picture
            images[i] = pil_to_tensor(center_crop(picture, image_size))
        except InputError:
            unreadable.append(str(picture))
        if i % 1000 == 0:
            log(f"reading images: {i:,} of {n:,}", status=True)
    refuse(unreadable, f"{len(unreadable)} of {n} files cannot be read as images: "
                       f"{', '.join(unreadable[:10])}; replace or remove them")
    return images.to(device), torch.tensor(labels, device=device)

def hold_out(labels, seed):
    """Every tenth image of a random order, class by class: bool (n,)."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels.cpu()[order].argsort(stable=True)]     # by class, at random within
    return torch.zeros_like(labels).index_fill(0, order[::10].to(labels.device), 1).bool()

def load_data(config, image_size, device):
    """Both parts of config.data. Raises InputError when they cannot be trained on."""
    name = f"--data {config.data}"
    pictures, classes = open_split(config.data, "train", image_size)
    test_pictures, test_classes = open_split(config.data, "test", image_size)
    odd = sorted(set(classes) ^ set(test_classes))
    refuse(odd, f"{name} has {odd[:1]} in only one of train and test; it must be in both")
    refuse(len(classes) < 2, f"{name} has one class; it needs two, as train/CLASS/*")
    images, labels = decode(pictures, image_size, device)
    held = hold_out(labels, config.seed) if config.patience else torch.zeros_like(labels) > 0
    held_out, images, labels = (images[held], labels[held]), images[~held], labels[~held]
    n = len(images)
    refuse(config.batch_size > n, f"--batch-size {config.batch_size} is more than the {n} images")
    std, mean = torch.std_mean(images[::max(1, n // 1000)] / 255, dim=(0, 2, 3), keepdim=True)
    return Data(images, labels, *decode(test_pictures, image_size, device), classes, mean[0],
                std[0].clamp(min=0.01), config.data != "shapes", held_out)     # both (C, 1, 1)

# ---- 12. Checkpoints -----------------------------------------------------------------------------
@dataclass
class Run:
    """What changes in a run at work."""
    model: nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler
    history: list                   # a dict of figures for each epoch
    saved: float = 0.0              # the time of its checkpoint, once it has written it
    best: dict = None               # with --patience: the weights of the best held-out epoch

def make_model(name, config):
    """The ViT of a configuration; or "resnet18" from torchvision, which takes C and K from it. As
    is usual for small images, its first convolution is 3 x 3 with stride 1, without max-pool."""
    if name == "vit":
        return ViT(config)
    model = models.resnet18(num_classes=config.num_classes)
    model.conv1 = nn.Conv2d(config.in_channels, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool, model.config = nn.Identity(), config
    return model

def chosen(history):
    """What was noted of the best held-out epoch; of the last, if no images are held out."""
    return min(history, key=lambda row: row.get("val_loss", -row["epoch"]))

@contextlib.contextmanager
def beside(path):
    """A file to write, which then takes the place of `path`: a whole one is always there."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")               # two runs share none
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; try another --out") from None
    finally:
        temporary.unlink(missing_ok=True)

def make_room(files):
    """Rename files of an earlier run, or of another one at work."""
    names = ([file.with_suffix(f".old{n}{file.suffix}") for file in files]
             for n in itertools.count(1))
    free = next(group for group in names if not any(map(Path.exists, group)))
    for file, new in zip(files, free):
        if file.is_file():
            log(f"note: {file} was there, not of this run; it is now {file.replace(new)}")

def save_run(run, config, data):
    """Write the checkpoint, then the log and the curves anew from its history."""
    checkpoint = {"format": 1, "vit": asdict(run.model.config), "train": asdict(config),
                  "images": len(data.images), "classes": data.classes,
                  "mean": data.mean.flatten().tolist(), "std": data.std.flatten().tolist(),
                  "model": run.model.state_dict(), "best": run.best,
                  "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
                  "scaler": run.scaler.state_dict(), "epoch": len(run.history),
                  "history": run.history}
    out, table, curves = files = [Path(config.out).with_suffix(s) for s in (".pt", ".csv", ".png")]
    torch.save(checkpoint, memory := io.BytesIO())
    with beside(out) as file:
        file.write_bytes(memory.getbuffer())
        if not out.is_file() or out.stat().st_mtime != run.saved:
            make_room(files)
    run.saved, rows = out.stat().st_mtime, [run.history[0], *map(dict.values, run.history)]
    try:
        with beside(table) as file:
            file.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
        with beside(curves) as file:
            draw_curves(run.history).savefig(file, format="png")
    except InputError as error:         # open elsewhere, perhaps
        log(f"note: {error}. The run goes on, without log or curves of this epoch")

# timm, DeiT and DINO use the names of this file; torchvision's are others. A wrapper left a prefix.

RENAMED = {
    r"_orig_mod\.|module\.|backbone\.": "", "conv_proj": "patch_embed.proj", "ln_": "norm",
    r"encoder\.pos_embedding": "pos_embed", r"encoder\.ln": "norm", r"heads\.head": "head",
    r"(layer_\d+\.mlp)\.0": r"\1.fc1", r"(layer_\d+\.mlp)\.3": r"\1.fc2",
    "class_token": "cls_token", r"self_attention\.in_proj_": "attn.qkv.",
    r"self_attention\.out_proj": "attn.proj", r"encoder\.layers\.encoder_layer_": "blocks."}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}

def rename(weights):
    for old, new in RENAMED.items():
        weights = {re.sub(old, new, name): weight for name, weight in weights.items()}
    return weights

def as_checkpoint(file):
    """Weights of others as a checkpoint before any epoch; their tensors say the sizes."""
    inner = next((file[part] for part in ("model", "state_dict", "teacher") if part in file), file)
    weights = {name: w.float() for name, w in rename(inner).items() if name not in IMAGENET}
    D, _, P, _ = weights["patch_embed.proj.weight"].shape
    weights = {"head.weight": torch.zeros(1, D), "head.bias": torch.zeros(1)} | weights
    side = math.isqrt(weights["pos_embed"].shape[1] - 1)        # no square: refused when loaded
    vit = dict(image_size=side * P, patch_size=P, dim=D, num_classes=len(weights["head.weight"]),
               depth=sum(name.endswith("norm1.weight") for name in weights),
               num_heads=max(1, D // 64), mlp_ratio=len(weights["blocks.0.mlp.fc1.weight"]) / D)
    pixels = {name: torch.as_tensor(file.get(name, IMAGENET[name])).tolist() for name in IMAGENET}
    return pixels | {"format": 1, "model": weights, "vit": vit, "train": {}, "classes": [],
                     "whose": "the file" if "mean" in file else "ImageNet"}

def load_checkpoint(path, foreign=False):
    """A checkpoint as a dict: its configurations as objects, mean and std (C, 1, 1), and as "net"
    its model in eval mode, with the best weights, if there are any. `foreign`: or one of others."""
    try:
        damaged = zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip()
        refuse(damaged, f"damaged at {damaged}")        # torch.load looks at no checksums
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)    # runs no code of it
        if foreign and "format" not in checkpoint:
            checkpoint = as_checkpoint(checkpoint)
        refuse(checkpoint.get("format") != 1, f"its format is {checkpoint.get('format')}, not 1")
        vit, config = ViTConfig(**checkpoint["vit"]), TrainConfig(**checkpoint["train"])
        mean, std = (torch.tensor(checkpoint[name]).reshape(3, 1, 1) for name in ("mean", "std"))
        with torch.device("meta"):      # shapes alone; the tensors of the file take their place
            net = make_model(config.model, vit).eval()
        for part in filter(checkpoint.get, ("model", "best")):      # the best last
            checkpoint[part] = rename(checkpoint[part])
            net.load_state_dict(checkpoint[part], assign=True)
    except Exception as error:          # whatever zip, pickle or the parts make of a foreign file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):   # PyTorch's text tells how to run the code
            reason = "it holds more than tensors and plain values, or is no file of PyTorch"
        raise InputError(f"{path} is not a whole checkpoint of vit.py{' or a plain ViT' * foreign} "
                         f"({reason}); to make one: python vit.py train") from None
    return checkpoint | dict(vit=vit, train=config, net=net, mean=mean, std=std)

def restore_model(path):
    """A checkpoint and its model, in eval mode; mean and std as (C, 1, 1)."""
    checkpoint = load_checkpoint(path)
    if checkpoint.get("best"):
        checkpoint["epoch"] = chosen(checkpoint["history"])["epoch"]
        log(f"{path}: the weights of epoch {checkpoint['epoch']}, the best on held-out images")
    return checkpoint, checkpoint["net"], checkpoint["mean"], checkpoint["std"]

def begin_from(start, run, data, config):
    """Give a new run the weights of `start`, a checkpoint or as_checkpoint, and say how."""
    old, model, known = start["net"], run.model, start["classes"] == data.classes
    if not known:
        old.head = model.head                               # which begins anew
    table = resize_positions(old.pos_embed, old.grid, *model.grid)
    table = table if model.config.pos_embed == "learned" else model.pos_embed
    model.load_state_dict(old.state_dict() | {"pos_embed": table})
    log(f"init    {config.init}: positions of {old.grid} for a grid of {model.grid}, "
        f"{'its own' if known else 'a new'} head, mean and std of {start.get('whose', 'the file')};"
        + "".join(f" {flag(name)} {getattr(config, name)}" for name in FINE_TUNE))

def go_on(checkpoint, run, data, config):
    """Give a run the state in which it was saved. Raises InputError if the data are others."""
    refuse(checkpoint["classes"] != data.classes or checkpoint["images"] != len(data.images)
           or not torch.allclose(checkpoint["mean"], data.mean.cpu()),
           "these are not the images that the checkpoint was trained on; give the same --data")
    run.model.load_state_dict(checkpoint["model"])
    run.history, run.best = checkpoint["history"], checkpoint.get("best")
    for optimizer, old in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": old["state"]})
    run.scaler.load_state_dict(checkpoint["scaler"] or run.scaler.state_dict())
    if os.path.realpath(config.out) == os.path.realpath(config.resume):
        run.saved = os.path.getmtime(config.out)
    log(f"{config.resume} goes on after epoch {len(run.history)}")

def prepare(config, vit_config, checkpoint=None):
    """Load the data, make or restore the model, and say what is about to be done."""
    device, (rank, total) = pick_device(config.device), processes()
    dtype, S = pick_precision(config.amp, device), vit_config.image_size
    if total > 1 and device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))    # from here on "cuda" means it
    if total > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank > 0:
        distributed.barrier()           # process 0 reads the data first: it may have to download
    data = load_data(config, S, device)
    if rank == 0 and total > 1:
        distributed.barrier()
    vit = replace(vit_config, num_classes=len(data.classes))
    torch.manual_seed(config.seed)
    model = make_model(config.model, vit).to(device)
    for name, parameter in model.named_parameters():
        if config.freeze and layers_above(name, vit.depth) > vit.depth - config.freeze:
            parameter.requires_grad_(False)
    if config.compile:
        model.compile()                 # in place: the names of the weights stay as they are
    if config.init:                     # pixels as those weights know them
        data.mean, data.std = checkpoint["mean"].to(device), checkpoint["std"].to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(model, make_optimizers(model, config, dtype), scaler, history=[])
    if checkpoint:
        (go_on if config.resume else begin_from)(checkpoint, run, data, config)
    name, patches = config.model, (S // vit.patch_size) ** 2
    if name == "vit":
        name = f"{vit.depth} blocks, {vit.num_heads} heads, width {vit.dim}, {patches + 1} tokens"
        if not 16 <= patches <= 1024:
            log(f"warning: usual are 16 to 1,024 patches, not {patches:,}; see --patch-size")
    log(f"model   {name}, {sum(p.numel() for p in model.parameters()):,} parameters\n"
        f"data    {config.data}: {len(data.images):,} training and {len(data.test_images):,} test "
        f"images of {S} x {S}, {len(data.classes)} classes, {len(data.held_out[1]):,} held out\n"
        f"run     {config.epochs} epochs in batches of {config.batch_size}, "
        f"{' + '.join(type(o).__name__ for o in run.optimizers)}, {device}, {dtype}")
    return run, data, dtype

# ---- 13. Pictures --------------------------------------------------------------------------------

def times_uniform(values):
    """A map (..., N-1) as multiples of an even one: 1 is no preference. Zeros stay zeros."""
    mean = values.mean(dim=-1, keepdim=True)
    return values / mean.where(mean > 0, 1)

def blend(view, maps, top, side, columns=1):
    """Maps (n, rows, cols), 0 to `top`, over the PIL image `view`, about `side` pixels each, as one
    grid (3, height, width): the hotter a patch, the less of the dimmed image is seen there."""
    S = maps.shape[2] * max(1, round(side / maps.shape[2]))     # whole pixels a patch
    image = pil_to_tensor(view.resize((S, S))) / 255
    image = image * 0.25 / image.mean().clamp(min=0.25)         # a dark photograph is dark enough
    heat = F.interpolate((maps / top).sqrt()[:, None], (S, S))  # the root shows weak heat as well
    color = torch.from_numpy(cm.inferno(heat[:, 0].numpy())[..., :3]).movedim(-1, 1)
    return make_grid(torch.lerp(image, color.float(), 0.8 * heat), nrow=columns)

def show(axes, image, title="", top=0, **options):
    """An image (C, H, W) under its title and, if it is a map, over its scale: 0 to `top`."""
    axes.imshow(image.movedim(0, -1).numpy(), **options)
    axes.set_title(title, loc="left", parse_math=False)
    axes.set(xticks=[], yticks=[])
    if top:
        scale = cm.ScalarMappable(colors.PowerNorm(0.5, 0, top), "inferno")
        axes.figure.colorbar(scale, cax=axes.inset_axes((0, -0.05, 1, 0.03)), ticks=[0, 1, top],
                             orientation="horizontal", format="%.2g").minorticks_off()

def draw_answer(axes, photo, view, truth, best, patches):
    """Into three axes: the photograph and the crop, the patches, the most probable classes."""
    small = photo.reduce(max(1, max(photo.size) // 400))        # 48 megapixels would take seconds
    show(axes[0], pil_to_tensor(small), f"the image: {truth or '%d x %d pixels' % photo.size:.24}",
         extent=(0, photo.width, photo.height, 0))
    x, y, r = photo.width / 2, photo.height / 2, min(photo.size) / 2
    axes[0].plot([x - r, x + r, x + r, x - r, x - r], [y - r, y - r, y + r, y + r, y - r],
                 color="red", lw=3, clip_on=False)
    show(axes[1], pil_to_tensor(view), f"the model sees {patches} x {patches} patches",
         extent=2 * (0, patches))
    for lines in (axes[1].vlines, axes[1].hlines):
        lines(range(1, patches), 0, patches, color="white", lw=0.6)
    for i, (name, probability) in enumerate(best):
        axes[2].barh(i, probability, height=0.3, color="tab:blue")
        axes[2].text(0, i - 0.25, f"{name:.24} {probability:.1%}", size=13, parse_math=False)
    axes[2].set(xlim=(0, 1), ylim=(4.5, -0.5))
    axes[2].axis("off")

def draw_picture(photo, model, mean, std, classes, target="", truth=""):
    """What a model sees in an RGB PIL image: a figure, and the five likeliest [(class, p)]. The
    relevance is that of `target`, else of the likeliest; `truth` is the right one, if known."""
    view = center_crop(photo, model.config.image_size)
    images = normalise(pil_to_tensor(view)[None], mean, std)            # (1, C, S, S)
    with torch.inference_mode():
        logits, attention = model(images, return_attention=True)
    p = logits[0].softmax(dim=0)                                        # (K,)
    best = [(classes[i], p[i].item()) for i in p.argsort(descending=True)[:5]]
    target = target or best[0][0]
    c = classes.index(target)
    heads = torch.stack([A[0, :, 0, 1:] for A in attention])            # (L, h, N-1)
    maps = torch.stack([heads[-1].mean(dim=0), attention_rollout(attention)[0],
                        relevance(model, images, c)[0]])                # (3, N-1)
    L, h = heads.shape[:2]
    titles = (f"CLS attention, block {L}, all heads", f"rollout, blocks 1 to {L}",
              f"relevance for {target:.20} ({p[c]:.0%})")
    heads, maps = (times_uniform(x).reshape(-1, *model.grid) for x in (heads, maps))
    tops = [max(4, x.max().item()) for x in (maps[:2], maps[:2], maps[2], heads)]
    figure, cell = Figure(figsize=(16, 9), dpi=100), min(735 / L, 590 / h)      # of a head's map
    side = min(350, (1500 - cell * h) / 3)
    boxes = [(20 + i % 3 * (side + 20), 90 + i // 3 * (side + 32), side, side) for i in range(6)]
    boxes.append((1580 - cell * h, 90, cell * h, cell * L))     # pixels, from the upper left
    *axes, grid = [figure.add_axes((x / 1600, 1 - (y + b) / 900, a / 1600, b / 900))
                   for x, y, a, b in boxes]
    draw_answer(axes, photo, view, truth, best, model.grid[0])
    for i in range(3):
        show(axes[3 + i], blend(view, maps[i:i + 1], tops[i], side), titles[i], tops[i])
    show(grid, blend(view, heads, tops[3], cell, h), "", tops[3], extent=(0, h, L, 0))
    grid.set(xticks=[i + 0.5 for i in range(h)], xticklabels=range(1, h + 1), xlabel="head",
             yticks=[i + 0.5 for i in range(L)], yticklabels=range(1, L + 1), ylabel="block")
    grid.tick_params(length=0, labeltop=True, labelbottom=False)
    grid.xaxis.set_label_position("top")
    bold = dict(y=0.95, size=20, weight="bold", parse_math=False)
    figure.text(x=0.0125, s=f"The answer: {best[0][0]:.30} ({best[0][1]:.0%})", **bold)
    figure.text(x=0.9875, s="The evidence: CLS attention", ha="right", **bold)
    figure.text(0.0125, 0.02, "Scale: multiples of uniform attention, 1: no preference. Attention "
                "is where information flowed, not proof of why (Jain and Wallace, 1902.10186).")
    return figure, best

def draw_learnt(model, images, epoch):
    """Filters, positions and distances of a model, over images (B, C, S, S), normalised."""
    figure = Figure(figsize=(16, 5.4), dpi=100, layout="constrained")
    filters, positions, distances = figure.subplots(1, 3)
    E = next(model.patch_embed.parameters()).detach()       # the first convolution: (D, C, P, P)
    waves = torch.linalg.svd((E - E.mean(dim=0)).flatten(1), full_matrices=False).Vh[:28]
    waves = waves / waves.abs().amax(dim=1, keepdim=True) / 2 + 0.5         # (up to 28, C*P*P)
    grid = make_grid(waves.reshape(-1, *E.shape[1:]), nrow=7, padding=1, pad_value=1)
    show(filters, grid, f"filters: principal components, after epoch {epoch}")
    filters.axis("off")
    places = F.normalize(model.pos_embed.detach()[0, 1:], dim=1)        # (N-1, D)
    grid = make_grid((places @ places.T).reshape(-1, 1, *model.grid), nrow=model.grid[1],
                     padding=1, pad_value=torch.nan)
    show(positions, grid[:1], "cosine similarity of each place with all", cmap="inferno", vmax=1)
    figure.colorbar(positions.images[0], ax=positions, shrink=0.8)
    sizes, N = (model.grid, model.config.patch_size), 1 + len(places)
    with torch.inference_mode():        # one by one: 50 large images at once need much memory
        far = sum(attention_distance(model(x[None], True)[1], *sizes) for x in images)  # (L, h)
    even, blocks = attention_distance([torch.ones(1, 1, N, N)], *sizes), range(1, len(far) + 1)
    distances.plot(blocks, far / len(images), "o", color="tab:blue")
    distances.axhline(even.item(), color="gray", ls="--", label="attention to all alike")
    distances.set(title="how far each head looks", xlabel="block", ylabel="mean distance, pixels",
                  xticks=blocks, ylim=(0, 1.5 * even.item() or 1))
    distances.legend()
    return figure

def draw_curves(history):
    """Loss and accuracy (0 to 1) over the epochs: a figure."""
    figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        for key in (key for key in history[0] if key.endswith(what)):
            axes.plot([r["epoch"] for r in history], [r[key] for r in history], "o-", label=key)
        axes.set(xlabel="epoch", title=what)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure

# ---- 14. The command line ------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(f"{message}; see python {self.prog} --help")

def flag(name):
    return "--" + name.replace("_", "-")

def make_parser():
    """The options of train are the fields with a comment, their help. What is not typed is left
    out (SUPPRESS), so that no default hides what a checkpoint or a variant says."""
    source = Path(__file__).read_text(encoding="utf-8")
    notes = dict(re.findall(r"^    (\w+): .* = .*?#\s+(.*)", source, re.M))
    parser = Parser(prog="vit.py", allow_abbrev=False,
                    description="Train a Vision Transformer, and see what it looks at.")
    parser.add_argument("--version", action="version", version=f"vit.py {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,eval,viz}")
    fit, test, look = (commands.add_parser(name, help=text, allow_abbrev=False) for name, text in (
        ("train", "train a model"), ("eval", "test it, class by class"),
        ("viz", "see what it looks at")))
    for title, cls in (("training", TrainConfig), ("model", ViTConfig)):
        group = fit.add_argument_group(title)
        for f in (f for f in fields(cls) if f.name in notes):
            words = get_args(f.type)
            kind = dict(choices=words) if words else dict(type=f.type)
            kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else kind
            group.add_argument(flag(f.name), default=argparse.SUPPRESS, **kind,
                               help=f"{notes[f.name]} (default: {f.default or repr(f.default)})")
    group.add_argument("--variant", choices=VARIANTS, default=argparse.SUPPRESS,
                       help="a size by name: sets dim, depth, num-heads and patch-size")
    for p in (test, look):
        p.add_argument("--ckpt", required=True, metavar="FILE", help="what train wrote")
        p.add_argument("--data", help="where test images are (default: what it was trained on)")
    test.add_argument("--device", default="auto", help="auto, cuda, mps or cpu")
    look.add_argument("--image", help="a file; test:7: the eighth test image; none: what it learnt")
    look.add_argument("--target", help="the class of the relevance map (default: the likeliest)")
    look.add_argument("--out", help="the picture (default: IMAGE_attention.png or learnt.png)")
    return parser

def check_output(path, suffix, *inputs):
    """Can a file be put at `path`? Asked before hours go into its content."""
    folder, same = Path(path).parent, os.path.realpath(path) in map(os.path.realpath, inputs)
    refuse(os.path.splitext(path)[1] != suffix or Path(path).is_dir() or not folder.is_dir()
           or not os.access(folder, os.W_OK) or same, f"--out {path} must be a {suffix} file, in a "
           f"folder that can be written to, and not the same as one that is read")

MAY_CHANGE = {"resume", "out", "epochs", "data", "device", "compile"}       # with --resume
KEPT = {"dim", "depth", "patch_size", "mlp_ratio", "pos_embed", "stem"}     # with --init

def read_options(typed):
    """Both configurations and the checkpoint to begin from, if any, from what was typed."""
    for name, value in typed.items():
        least, most = int(name in FROM_1), 0.99 if name in SHARES else 1e9
        refuse(not isinstance(value, str) and not least <= value <= most,       # a NaN fails, too
               f"{flag(name)} must lie between {least} and {most:g}, not {value}")
    typed = dict(zip(SIZES, VARIANTS.get(typed.pop("variant", None), ()))) | typed
    source, start, before, kept = typed.get("resume", typed.get("init")), None, {}, set()
    if "resume" in typed:
        start, kept = load_checkpoint(source), typed.keys() - MAY_CHANGE
        before = vars(start["vit"]) | vars(start["train"]) | {"out": source}
    elif source:
        start = load_checkpoint(source, foreign=True)
        kept = typed.keys() & (KEPT if "whose" in start else KEPT | {"num_heads"})
        before = vars(start["vit"]) | FINE_TUNE
    other = [f"{flag(name)} is {str(before[name]) or 'not set'}" for name in sorted(kept)
             if typed[name] != before[name]]
    refuse(other, f"in {source} {', '.join(other)}; leave out what differs, or start anew")
    options = before | typed
    vit, config = (cls(**{f.name: options[f.name] for f in fields(cls) if f.name in options})
                   for cls in (ViTConfig, TrainConfig))
    if config.resume:
        done, planned = start["epoch"], before["epochs"]
        refuse(config.epochs < max(done + 1, planned), f"{source} has had {done} of {planned} "
               f"epochs; it cannot be made shorter, only longer, by --epochs")
    cnn = "resnet18" in (config.model, start and start["train"].model)
    refuse(cnn and (config.init or config.freeze or config.layer_decay != 1),
           "--init, --freeze and --layer-decay are for a ViT, not for a CNN")
    refuse(config.freeze > vit.depth, f"--freeze {config.freeze}: the model has {vit.depth} blocks")
    refuse(config.batch_size % (total := processes()[1]),
           f"--batch-size {config.batch_size} does not divide by {total} processes")
    check_output(config.out, ".pt")
    return vit, config, start

def run_train(typed):
    vit, config, start = read_options(typed)
    run = None
    try:
        run, data, dtype = prepare(config, vit, start)
        train(run, data, config, dtype)
    except KeyboardInterrupt:
        saved = config.out if run and run.saved else config.resume
        log(f"stopped; go on with: python vit.py train --resume {shlex.quote(saved)}" if saved else
            "stopped in the first epoch; nothing is saved yet")
        raise
    if distributed.is_initialized():
        distributed.destroy_process_group()
    out, row = shlex.quote(config.out), chosen(run.history)
    log(f"test accuracy {row['test_accuracy']:.2%} after epoch {row['epoch']}"
        f"{', the best on held-out images' if config.patience else ''}\n"
        f"wrote {config.out}, with its log (.csv) and curves (.png)\n"
        f"next: python vit.py eval --ckpt {out}, or viz --ckpt {out} --image test:0")

def run_eval(typed):
    checkpoint, model, mean, std = restore_model(typed["ckpt"])
    config, classes, size = checkpoint["train"], checkpoint["classes"], checkpoint["vit"].image_size
    device, name = pick_device(typed["device"]), typed["data"] or config.data
    pictures, found = open_split(name, "any" if typed["data"] else "test", size)
    unknown = [c for c in found if c not in classes]
    refuse(unknown, f"--data {name} has {unknown}; the model knows {', '.join(classes)}")
    images, labels = decode(pictures, size, device)
    labels = torch.tensor([classes.index(c) for c in found], device=device)[labels]
    guess = predict(model.to(device), images, mean.to(device), std.to(device),
                    pick_precision(config.amp, device), config.batch_size).argmax(dim=1)
    right = guess == labels
    log(f"test accuracy {right.float().mean():.2%} on {len(labels):,} images of {name}\n\n"
        f"accuracy  class")
    for i in labels.unique():
        log(f"{right[labels == i].float().mean():8.1%}  {classes[i]}")
    log("\nmistakes  the most frequent")
    mistakes = Counter(zip(labels[~right].tolist(), guess[~right].tolist()))
    for (i, j), times in mistakes.most_common(5):
        log(f"{times:8}  {classes[i]} taken for {classes[j]}")

def run_viz(typed):
    checkpoint, model, mean, std = restore_model(typed["ckpt"])
    classes, name, target, truth = checkpoint["classes"], typed["image"], typed["target"], ""
    refuse(checkpoint["train"].model != "vit", "a CNN has no attention to draw; try eval")
    refuse(target and (target not in classes or name is None),
           f"--target {target} must be one of {', '.join(classes)}, with an --image")
    stem = "learnt" if name is None else Path(name.replace(":", "_")).stem + "_attention"
    out, size, photo, said = typed["out"] or f"{stem}.png", model.config.image_size, name or "", ""
    if name is None or name.startswith("test:"):
        tests, known = open_split(typed["data"] or checkpoint["train"].data, "test", size)
    if name and name.startswith("test:"):
        names = [f"test:{i}" for i in range(len(tests))]
        refuse(name not in names, f"--image {name} is none of test:0 to {names[-1]}")
        photo, label = tests[names.index(name)]
        truth = known[label]
    check_output(out, ".png", typed["ckpt"], str(photo))
    if name is None:
        some = torch.linspace(0, len(tests) - 1, min(50, len(tests))).long().tolist()
        images, _ = decode([tests[i] for i in some], size, "cpu")
        figure = draw_learnt(model, normalise(images, mean, std), checkpoint["epoch"])
    else:
        photo = photo if isinstance(photo, Image.Image) else open_image(photo)
        if min(photo.size) < size:
            log(f"warning: {name} is enlarged to the {size} pixels of the model", error=True)
        figure, best = draw_picture(photo, model, mean, std, classes, target, truth)
        said = f"{name}: {', '.join(f'{label} {p:.1%}' for label, p in best[:3])}\n"
    with beside(out) as file:
        figure.savefig(file, format="png")
    log(f"{said}wrote {out}")

def main(argv=None):
    """Run the command line `argv` (default: sys.argv); returns the exit code."""
    warnings.filterwarnings("ignore", module="PIL")             # of damaged EXIF data, for one
    warnings.filterwarnings("ignore", "Glyph .* missing")       # of the font: it draws boxes
    try:
        typed = vars(make_parser().parse_args(argv))
        {"train": run_train, "eval": run_eval, "viz": run_viz}[typed.pop("command")](typed)
        return 0
    except (KeyboardInterrupt, SystemExit) as end:      # SystemExit: of --help and --version
        return getattr(end, "code", 130)
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            text = f"--compile does not work here, leave it out ({text:.200})"
        elif isinstance(error, MemoryError) or re.search("(enough|of|allocate) memory", text):
            text = "memory is full; a smaller --batch-size, --image-size or model needs less"
        elif not isinstance(error, (InputError, OSError)):
            raise                                       # a fault of ours keeps its traceback
        time.sleep(5 * (processes()[0] > 0))            # of several processes the first speaks, and
        log(f"vit.py: {text}", error=True)              # then torchrun ends the others
        return 2

if __name__ == "__main__":
    if sys.stdout:          # not closed: letters that it cannot show become codes, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
