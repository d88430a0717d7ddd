"""The proof that vit.py does what it says: python -m pytest

Each test holds it against something that knows the answer independently: torchvision's own Vision Transformer,
PyTorch's attention, numbers by hand, a property that holds whatever the weights are. They run offline, without a GPU.
"""

import ast, csv, itertools, math, os, pickle, re, shlex, shutil, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageOps
from pytest import approx
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from torchvision.datasets import CIFAR10
from torchvision.models.vision_transformer import VisionTransformer

import vit

HERE = Path(__file__).parent
SOURCE, README = (HERE / "vit.py").read_text(), (HERE / "README.md").read_text()
SMALL = dict(image_size=16, patch_size=4, dim=32, depth=2, num_heads=2)
SHAPES = "train --data shapes --image-size 16 --dim 32 --depth 2 --num-heads 2 --batch-size 16 --device cpu"
vit.SHAPE_COUNTS.update(train=64, test=20)
CLOSE, EXACT = dict(atol=1e-5, rtol=1e-5), dict(atol=0, rtol=0)
CPU, NO_SCALER = torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=False)
torch.set_num_threads(1)         # the models here are small: two threads would only wait
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full, /proc or setrlimit")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    """Every test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The checkpoint of a small model after an epoch of a few shapes."""
    out = tmp_path_factory.mktemp("trained") / "vit.pt"
    assert cli(f"{SHAPES} --epochs 1 --out '{out}'") == 0
    return out

def cli(*commands):
    """Each command line through vit.main; the exit code of the last, the others must succeed."""
    codes = [vit.main(shlex.split(command)) for command in commands]
    assert not any(codes[:-1])
    return codes[-1]

def randomise(model, seed=0, scale=0.2):
    """In eval mode, with every parameter random, so that no zero or one hides an error."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data = scale * torch.randn(p.shape, generator=generator) + bool(re.search("(norm|ln).*weight", name))
    return model.eval()

def random_model(**options):
    return randomise(vit.ViT(vit.ViTConfig(**(SMALL | options))))

def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def noise_data(augmented=True):
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8), torch.arange(64) % 4
    return vit.Data(images, labels, images, labels, list("abcd"), torch.tensor(0.5), torch.tensor(0.25), augmented)

def make_folder(root, classes=("cat", "dog"), splits=("train", "test")):
    """A folder of noise images: root/SPLIT/CLASS/0.png to 7.png, 20 x 16 pixels."""
    rng = np.random.default_rng(0)
    for folder in (Path(root, split, name) for split in splits for name in classes):
        folder.mkdir(parents=True)
        for i in range(8):
            Image.fromarray(rng.integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(folder / f"{i}.png")

def altered(path, to, **parts):
    """A copy of a checkpoint with other parts."""
    torch.save(torch.load(path, weights_only=True) | parts, to)
    return to

def interrupt(*args):
    raise KeyboardInterrupt

PAYLOAD = type("Payload", (), {"__reduce__": lambda self: (open, ("was-run", "w"))})()     # code in a file

# ---- The model ------------------------------------------------------------------------------------
def test_returned_attention():
    """That of each block in order, part of the graph; and to ask for it changes nothing."""
    model, images, seen = random_model(), random_images(3, 3, 16, 16), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda attn, args, result: seen.append(result[1]))
    logits, attention = model(images, return_attention=True)
    assert logits.shape == (3, 10) and [A.shape for A in attention] == [(3, 2, 17, 17)] * 2
    assert all(map(torch.equal, attention, seen)) and len(seen) == 2 and torch.equal(model(images), logits)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(logits.sum(), attention))

@pytest.mark.parametrize("name, count", [("cifar", 2_693_578), ("Ti/16", 5_717_416), ("S/16", 22_050_664),
                                         ("B/16", 86_567_656), ("L/16", 304_326_632)])
def test_parameter_counts(name, count):
    """The counts that torchvision, DeiT and the paper's code have."""
    large = {} if name == "cifar" else dict(image_size=224, patch_size=16, num_classes=1000)
    with torch.device("meta"):
        model = vit.ViT(vit.ViTConfig(**large, **dict(zip(("dim", "depth", "num_heads"), vit.VARIANTS[name]))))
    assert sum(p.numel() for p in model.parameters()) == count
    assert name != "cifar" or model.config == vit.ViTConfig()       # the default

@pytest.mark.parametrize("size, patch, dim, depth, heads, ratio", [
    (32, 4, 192, 6, 3, 4.0), (16, 4, 32, 1, 1, 2.0), (48, 8, 48, 3, 4, 4.0), (224, 16, 64, 2, 8, 3.0)])
def test_logits_equal_torchvision(size, patch, dim, depth, heads, ratio):
    """It also pins the names of the parameters, which are the field's."""
    both = dict(image_size=size, patch_size=patch, num_classes=7)
    ours = random_model(**both, dim=dim, depth=depth, num_heads=heads, mlp_ratio=ratio)
    theirs = VisionTransformer(**both, num_layers=depth, num_heads=heads, hidden_dim=dim, mlp_dim=int(dim * ratio))
    names = {re.sub(r"\.\d+", "", name.removesuffix(".weight").removesuffix(".bias")) for name in ours.state_dict()}
    assert names == {"cls_token", "pos_embed", "patch_embed.proj", "norm", "head", *(f"blocks.{part}" for part in (
        "norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"))}
    ours.load_state_dict(vit.rename(randomise(theirs).state_dict()))
    a, b = (model.eval()(random_images(2, 3, size, size)) for model in (ours, theirs))
    assert_close(a, b, **CLOSE)
    assert b.std() > 0.1                    # random enough to tell

@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_equals_pytorch(heads):
    """Outputs, weights and gradients: ours step by step, by the fused kernel, and PyTorch's layer."""
    attn, results = random_model(num_heads=heads).blocks[0].attn, []
    for kind in ("steps", "fused", "pytorch"):
        x = random_images(3, 9, 32).requires_grad_()
        if kind == "pytorch":
            out, weights = F.multi_head_attention_forward(
                *[x.transpose(0, 1)] * 3, 32, heads, attn.qkv.weight, attn.qkv.bias, None, None, False, 0.0,
                attn.proj.weight, attn.proj.bias, training=False, average_attn_weights=False)
            out = out.transpose(0, 1)
        else:
            out, weights = attn(x, fused=kind == "fused")
        results.append((weights, out, *torch.autograd.grad(out.square().sum(), [x, *attn.parameters()])))
    steps, fused, pytorch = results
    assert_close(steps[:2], pytorch[:2], **CLOSE)
    for others in (fused, pytorch):
        assert_close(steps[1:], others[1:], atol=1e-4, rtol=1e-4)
    assert fused[0] is None

def test_worked_example_of_section_3():
    """q, k and v as in the text, planted in the weights: token i is one-hot, so column i is its row."""
    attn, k = vit.Attention(vit.ViTConfig(dim=4, num_heads=1, patch_size=4)), torch.zeros(4, 4)
    k[0, 1] = k[0, 2] = k[1, 2] = 2
    attn.load_state_dict({"qkv.weight": torch.cat([torch.ones(4, 4), k, torch.eye(4)]), "qkv.bias": torch.zeros(12),
                          "proj.weight": torch.eye(4), "proj.bias": torch.zeros(4)})
    out, weights = attn(torch.eye(4)[None, :3])
    expected, unscaled = torch.tensor([0.090, 0.245, 0.665]), torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    assert_close(weights[0, 0, 0], expected, atol=5e-4, rtol=0)
    assert_close(out[0, 0], F.pad(expected, (0, 1)), atol=5e-4, rtol=0)
    assert_close(unscaled, torch.tensor([0.016, 0.117, 0.867]), atol=5e-4, rtol=0)

def test_patches_places_and_images():
    """A patch cut by hand; only positions tell places apart; images do not mix; every parameter has a gradient."""
    model, images = random_model().train(), random_images(4, 3, 16, 16)
    proj, patch = model.patch_embed.proj, images[1, :, 4:8, 8:12].reshape(-1)   # second row, third column:
    expected = proj.weight.reshape(32, -1) @ patch + proj.bias                  # token 1 * 4 + 2
    assert_close(model.patch_embed(images)[1, 6], expected, **CLOSE)
    logits, other = model(images), model(torch.cat([images[:2], images[2:3] + 1, images[3:]]))
    assert_close(logits[[0, 1, 3]], other[[0, 1, 3]])
    assert not torch.allclose(logits[2], other[2], atol=1e-3)
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert not [name for name, p in model.named_parameters() if not p.grad.abs().sum() > 0]
    patches = F.unfold(images, 4, stride=4)[:, :, torch.randperm(16)]
    shuffled = F.fold(patches, (16, 16), 4, stride=4)
    assert not torch.allclose(logits, model(shuffled), atol=1e-3)
    model.requires_grad_(False).pos_embed.zero_()
    assert_close(model(images), model(shuffled), **CLOSE)

def test_positions():
    """They begin as waves, and are resized like an image for another grid; the class token's stays."""
    table = vit.sincos_positions(3, 5, 8)               # row 2, column 3: frequencies 1 and 1/10
    waves = [f(place * rate) for place in (2, 3) for f in (math.sin, math.cos) for rate in (1, 0.1)]
    assert_close(table[2 * 5 + 3], torch.tensor(waves))
    assert table.shape == (15, 8) and vit.sincos_positions(2, 2, 7).shape == (4, 7)
    model = random_model(image_size=32)                 # 8 x 8 patches
    assert vit.resize_positions(model.pos_embed, (8, 8), 8, 8) is model.pos_embed
    assert model(random_images(1, 3, 64, 16)).shape == (1, 10)
    for rows, cols in ((3, 5), (16, 4)):
        places = model.pos_embed[0, 1:].T.reshape(1, 32, 8, 8)
        places = F.interpolate(places, (rows, cols), mode="bicubic", antialias=True)[0].reshape(32, rows * cols)
        resized = vit.resize_positions(model.pos_embed, (8, 8), rows, cols)
        assert_close(resized[0], torch.cat([model.pos_embed[0, :1], places.T]))
    with pytest.raises(ValueError, match="17 x 16"):
        model(random_images(1, 3, 17, 16))

SCHEMES = [{"pos_embed": name} for name in ("learned", "sine", "rope", "none")] + [{"stem": "conv"}]

@pytest.mark.parametrize("options", SCHEMES, ids=["learned", "sine", "rope", "none", "conv"])
def test_each_scheme(options):
    """Order matters, but for `none`; other grids and all maps work; the fixed is not trained."""
    model, scheme, results = random_model(**options), options.get("pos_embed"), []
    images, tokens = random_images(2, 3, 8, 24), random_images(2, 12, 32)
    logits, attention = model(images, return_attention=True)
    assert logits.shape == (2, 10) and attention[0].shape == (2, 2, 13, 13)
    maps = vit.attention_rollout(attention), vit.relevance(model, images, 3)
    assert all(values.shape == (2, 12) and values.std() > 0 for values in maps)
    assert vit.attention_distance(attention, (2, 6), 4).shape == (2, 2)
    for order in (range(12), [3, 1, 4, 0, 5, 9, 2, 6, 8, 7, 11, 10]):
        model.patch_embed.forward = lambda _, order=order: tokens[:, order]
        results.append(model(images))
    assert torch.allclose(*results, atol=1e-4) == (scheme == "none")
    trained = [id(p) for o in vit.make_optimizers(model, vit.TrainConfig()) for g in o.param_groups for p in g["params"]]
    fixed = [name for name, p in model.named_parameters() if id(p) not in trained]
    assert fixed == ["pos_embed"] * (scheme in ("sine", "rope", "none"))
    waves = vit.sincos_positions(4, 4, 32) / 2 * (scheme not in ("rope", "none"))
    assert torch.equal(vit.ViT(model.config).pos_embed[0, 1:], waves)

def test_rope_scores_hang_on_offsets_alone():
    rotate, x = vit.rotation(5, 6, 16, "cpu"), random_images(2, 2, 31, 16)
    assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotate(x)[:, :, 0], x[:, :, 0]) and rotate(x.half()).dtype == torch.half
    q, k = (rotate(y.expand(1, 31, 16))[0, 1:].reshape(5, 6, 16) for y in random_images(2, 16))
    scores = torch.einsum("rcd,RCd->rcRC", q, k)        # one query and one key, at all places
    assert_close(scores[1:, 2:, 1:, 2:], scores[:-1, :-2, :-1, :-2])
    assert len({round(s, 3) for s in scores[2, 2].flatten().tolist()}) == 30    # no two alike
    attn, x = random_model().blocks[0].attn, random_images(1, 31, 32)
    assert_close(*(attn(x, fused=way, rotate=rotate)[0] for way in (False, True)), **CLOSE)

def test_convolutional_stem():
    for P, widths in ((2, [8]), (4, [4, 8]), (16, [1, 2, 4, 8])):
        embed = random_model(image_size=32, patch_size=P, dim=8, stem="conv").patch_embed
        assert embed(random_images(2, 3, 32, 48)).shape == (2, 32 * 48 // P**2, 8)
        assert [layer.out_channels for layer in embed.stem[::3]] == widths

@pytest.mark.parametrize("options", ["--pos-embed sine", "--pos-embed rope", "--pos-embed none", "--stem conv"])
def test_each_scheme_through_the_command_line(options):
    assert cli(f"{SHAPES} --epochs 1 {options}", "train --resume vit.pt --epochs 2", "eval --ckpt vit.pt",
               "viz --ckpt vit.pt", "viz --ckpt vit.pt --image test:3",
               f"{SHAPES} --epochs 1 {options} --image-size 24 --init vit.pt --freeze 1 --out finer.pt") == 0
    plain, finer = (vit.load_checkpoint(name)["model"] for name in ("vit.pt", "finer.pt"))
    kept = [name for name in plain if name.startswith(("patch_embed", "blocks.0"))]
    assert all(torch.equal(plain[name], finer[name]) for name in kept) and finer["pos_embed"].shape[1] == 37

def test_initialisation():
    torch.manual_seed(0)
    model = vit.ViT(vit.ViTConfig())
    block, x = model.blocks[0], torch.randn(2, 65, 192)
    q, k, v = block.attn.qkv(x).reshape(2, 65, 3, 3, 64).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(2, 3) / 8                          # as section 3 supposes
    tokens = model.patch_embed(torch.randn(2, 3, 32, 32))
    assert all(abs(part.std() - 1) < 0.1 for part in (tokens, block.mlp.fc1(x), q, k, v, scores))
    assert torch.equal(block(x)[0], x)                          # a block starts as the identity
    assert abs(F.cross_entropy(model(torch.randn(64, 3, 32, 32)), torch.arange(64) % 10) - math.log(10)) < 0.1

def test_dropout_and_drop_path():
    """A branch is dropped whole. Dropout acts on the weights of attention too, not only on its output."""
    torch.manual_seed(0)
    layer, x = vit.Block(vit.ViTConfig(), 0.25).drop_path, torch.ones(4000, 2, 3)
    assert torch.equal(layer.eval()(x), x)
    out = layer.train()(x)
    assert (out == out[:, :1, :1]).all() and abs(out.mean() - 1) < 0.05 and out.unique().tolist() == approx([0, 4 / 3])
    assert [block.drop_path.p for block in random_model(drop_path=0.3, depth=4).blocks] == approx([0, 0.1, 0.2, 0.3])
    attn, x = random_model(dropout=0.5).blocks[0].attn, random_images(1, 9, 32)
    expected = attn(x)[0]
    for fused in (False, True):
        assert_close(attn.eval()(x, fused=fused)[0], expected, **CLOSE)
        out = attn.train()(x.expand(4000, -1, -1), fused=fused)[0]
        assert ((out.mean(0) - expected[0]).abs() < 6 * out.std(0) / 4000**0.5).all()
        assert (out / 2 - expected)[out != 0].std() > 0.1 * expected.std()

@pytest.mark.parametrize("name, side, patch, digits", [("cifar", 32, 4, 2), ("B/16", 224, 16, 1)])
def test_cost_of_the_text(name, side, patch, digits):
    """12ND^2 + 2N^2D against PyTorch's count of a block (two operations a multiply-add); the table."""
    (dim, depth, heads, size), N = vit.VARIANTS[name], (side // patch) ** 2 + 1
    linear, pairs = 12 * N * dim**2, 2 * N**2 * dim
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        vit.Block(vit.ViTConfig(dim=dim, num_heads=heads), drop_path=0)(torch.empty(1, N, dim))
    assert counter.get_total_flops() == 2 * (linear + pairs) and size == patch
    numbers = [f"{number / 1e6:.1f} M" for number in (linear, pairs, linear + pairs)]
    numbers += [f"{depth * (linear + pairs) / 1e9:.{digits}f} G"]
    assert re.search(rf"{side}/{patch} +{N} +{dim} +" + " +".join(map(re.escape, numbers)), SOURCE)

# ---- Data -----------------------------------------------------------------------------------------
def test_shapes():
    images, labels, masks = made = vit.make_shapes(200, 32, seed=3)
    assert images.dtype == torch.uint8 and masks.dtype == torch.bool
    assert images.shape == (200, 3, 32, 32) and masks.shape == (200, 32, 32)
    assert all(map(torch.equal, made, vit.make_shapes(200, 32, seed=3)))
    assert not torch.equal(images, vit.make_shapes(200, 32, seed=4)[0])
    assert labels.bincount(minlength=10).tolist() == [20] * 10
    colours, spread = torch.tensor(list(vit.COLOURS.values())), images.amax(1) - images.amin(1)
    for image, label, mask, s in zip(images.float(), labels, masks, spread.float()):    # s: far from grey
        distance = (colours - image[:, mask].mean(1)).square().sum(1)
        assert distance.argmin() == label // 2 and s[mask].mean() > 100 and s[~mask].mean() < 40
        rows, cols = mask.nonzero().T
        middle = mask[(rows.min() + rows.max()) // 2, (cols.min() + cols.max()) // 2]
        assert middle == (label % 2 == 0)                       # a disc is full, a ring is not

def test_augment_is_a_shift_and_a_flip():
    torch.manual_seed(0)
    images, cases = random_images(32, 3, 8, 8), list(itertools.product(range(5), range(5), (False, True)))
    out, padded = vit.shift_and_flip(images, 2), F.pad(images, (2, 2, 2, 2))
    windows = [padded[:, :, y:y + 8, x:x + 8].flip([-1] if flip else []) for y, x, flip in cases]
    seen = [[case for case, w in zip(cases, windows) if torch.equal(out[i], w[i])] for i in range(32)]
    assert all(len(found) == 1 for found in seen)               # each image is exactly one of them
    assert [len(set(values)) for values in zip(*(found[0] for found in seen))] == [5, 5, 2]

def test_policy_and_mix():
    """The policy changes pixels alone. Of images that are the number of their class, a mix has its label's mean."""
    data = noise_data(augmented=False)
    images, labels = vit.augment(data.images, data.labels, data, policy_prob=1.0)
    plain = vit.normalise(data.images, data.mean, data.std)
    changed = [not torch.equal(x, p) and not torch.equal(x, p.flip(-1)) for x, p in zip(images, plain)]
    assert torch.equal(labels, data.labels) and sum(changed) > 32
    images, _ = vit.augment(data.images[:1].expand(64, -1, -1, -1), data.labels, data, policy_prob=1.0)
    assert 1 < len((images + images.flip(-1)).unique(dim=0)) <= 8       # an operation for each slice
    data.images = (60 * data.labels[:, None, None, None]).expand(-1, 3, 16, 16).to(torch.uint8)
    for _ in range(8):
        images, labels = vit.augment(data.images, data.labels, data, mix_prob=1.0)
        assert labels.shape == (64, 4) and torch.allclose(labels.sum(1), torch.ones(64))
        seen, expected = (images.mean(dim=(1, 2, 3)) * 0.25 + 0.5) * 255, 60 * (labels @ torch.arange(4.0))
        assert_close(seen, expected, atol=1e-2, rtol=1e-4)

@gpu
@pytest.mark.parametrize("policy, mix", [(0, 0), (1, 0), (0, 1)])
def test_cuda_alters_and_answers_as_the_cpu(policy, mix):
    model, seen, logits = random_model(), [], []
    for device in ("cpu", "cuda"):
        with torch.device(device):
            data = noise_data()
        draws = [vit.augment(data.images, data.labels, data, policy, mix) for _ in range(100)]
        x, y = (torch.stack(part) for part in zip(*draws))
        assert x.device.type == y.device.type == device and y.shape == (100, 64, 4)[:2 + mix]
        seen.append(torch.stack([z for part in (x, y.float()) for z in (part.mean(), part.std())]))
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):    # it rounds to TF32
            logits.append(model.to(device)(random_images(8, 3, 16, 16).to(device)).cpu())
    assert_close(seen[0], seen[1].cpu(), atol=0.1, rtol=0.1)
    assert_close(*logits, atol=1e-3, rtol=1e-3)

def test_cifar10_as_torchvision_reads_it(monkeypatch):
    """torchvision's class on batch files of the original's layout; only its checksums are left out."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, *md5: os.path.isfile(path))
    folder, rng, names = Path("data", CIFAR10.base_folder), np.random.default_rng(0), list("abcdefghij")
    folder.mkdir(parents=True)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        batch = {"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(batch))
    data = vit.load_data(vit.TrainConfig(batch_size=16), 32, CPU)
    assert data.images.shape == (50, 3, 32, 32) and data.test_images.shape == (10, 3, 32, 32)
    assert data.classes == names and data.labels.tolist() == list(range(10)) * 5 and data.augmented
    assert torch.equal(data.test_images.reshape(10, -1), torch.from_numpy(batch["data"]))
    assert_close(data.mean.flatten().double(), data.images.double().mean((0, 2, 3)) / 255, atol=1e-5, rtol=0)

def test_folders_with_names_of_every_kind(capsys):
    """Spaces, letters of other scripts and signs, in folders, classes and files; val instead of test."""
    make_folder("mes données", classes=("café noir", "猫 $x_1$"), splits=("train", "val"))
    data = vit.load_data(vit.TrainConfig(data="mes données", batch_size=4), 16, CPU)
    assert data.classes == ["café noir", "猫 $x_1$"] and data.images.shape == (16, 3, 16, 16)
    image = np.asarray(Image.open("mes données/train/café noir/0.png"))         # the middle, unscaled
    assert (data.images[0].permute(1, 2, 0).numpy() == image[:, 2:18]).all()
    Image.new("RGB", (40, 40)).save("Käfer 猫.png")
    assert cli(f"{SHAPES} --data 'mes données' --epochs 1 --batch-size 8 --out 'modèle 1.pt'",
               "viz --ckpt 'modèle 1.pt' --target '猫 $x_1$' --image 'Käfer 猫.png'", "eval --ckpt 'modèle 1.pt'") == 0
    assert vit.open_image("Käfer 猫_attention.png").size == (1600, 900) and not capsys.readouterr().err

def test_what_counts_as_an_image(capsys):
    """Suffixes that torchvision does not know; hidden entries and notes."""
    for name in ("cat", "dog", ".ipynb_checkpoints", "__MACOSX", "cat/.cache"):
        Path("pets", name).mkdir(parents=True)
    for name, kind in (("dog/0.png", "PNG"), ("cat/.cache/0.png", "PNG"), ("cat/a.jfif", "JPEG"), ("cat/a.GIF", "GIF"),
                       ("cat/a.tga", "TGA"), ("cat/a.jp2", "JPEG2000"), ("cat/a.ico", "ICO")):
        Image.new("RGB", (8, 8), "teal").save(Path("pets", name), format=kind)
    for name in ("cat/._0.jpg", ".ipynb_checkpoints/0.png", "cat/notes.txt", "cat/Thumbs.db", "cat/a.pdf"):
        Path("pets", name).write_text("no image")
    classes = vit.open_folder("pets", "any")
    assert list(classes) == ["cat", "dog"] and [len(files) for files in classes.values()] == [5, 1]
    assert capsys.readouterr().out.count("3 files of pets are skipped, as no images that can be opened (.db, .pdf, .txt)") == 1
    images, _ = vit.decode([(file, 0) for file in classes["cat"]], 8, "cpu")
    assert (images.float().mean((0, 2, 3)) - torch.tensor([0, 128, 128])).abs().max() < 3
    with pytest.raises(vit.InputError, match="dog holds too few images"):
        vit.open_folder("pets", "train")                        # the only one is for the test

def test_a_folder_of_classes_alone_is_split(capsys):
    make_folder("flat", splits=("",))
    train, test, both = (vit.open_folder("flat", split) for split in ("train", "test", "any"))
    assert [file.name for file in test["cat"]] == ["0.png", "5.png"]
    assert not set(train["cat"]) & set(test["cat"]) and sorted(train["cat"] + test["cat"]) == both["cat"]
    assert capsys.readouterr().out.count("every fifth") == 1
    make_folder("parts", splits=("Train", "valid"))
    Path("parts/test").mkdir()
    Path("parts/test/0.png").touch()                            # an unlabelled test folder
    train, test = (vit.open_folder("parts", split)["dog"] for split in ("train", "test"))
    assert len(train) == 8 and "valid" in str(test[0])

def test_images_from_the_world(monkeypatch, capsys):
    """Whatever they are like, they are read right; and the crop keeps the middle."""
    def read(image, name, **options):
        image.save(name, **options)
        return vit.open_image(name)
    half, exif = ImageOps.expand(Image.new("RGB", (20, 20), "white"), (20, 0, 0, 0)), Image.Exif()
    exif[0x0112] = 6                                    # "turn a quarter clockwise to see it upright"
    turned = read(half, "turned.jpg", exif=exif)
    assert turned.size == (20, 40) and turned.getpixel((10, 5))[0] < 20 < 235 < turned.getpixel((10, 35))[0]
    palette, red, blue = Image.new("P", (4, 4), 0), *(Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    for image, name, options, corner in (
            (palette, "palette.png", dict(transparency=0), (128, 128, 128)),
            (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "clear.png", {}, (128, 128, 128)),
            (Image.new("L", (1, 1), 7), "dot.png", {}, (7, 7, 7)),
            (red, "a.gif", dict(save_all=True, append_images=[blue]), (255, 0, 0))):    # the first frame
        assert read(image, name, **options).getpixel((0, 0)) == corner
    assert capsys.readouterr().err == "note: a.gif holds 2 pictures; the first is used\n"
    assert read(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "print.jpg").getpixel((0, 0))[0] > 200
    for scale in (1, 16):                               # of 12 bits, and of 16
        ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64) * scale
        grey = np.asarray(read(Image.fromarray(ramp), "deep.png"))[..., 0].flatten().astype(int)
        assert len(set(grey)) == 256 and (np.diff(grey) >= 0).all() and grey[-1] >= 254
    assert not capsys.readouterr().err
    wide = Image.effect_noise((400, 40), 80)
    middle = wide.resize((160, 16), Image.Resampling.BICUBIC).crop((72, 0, 88, 16))
    assert ImageChops.difference(vit.center_crop(wide, 16), middle).getextrema()[1] <= 1
    assert vit.center_crop(Image.new("RGB", (1, 1)), 32).size == (32, 32)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with pytest.raises(vit.InputError, match="turned.jpg.*800 pixels"):
        vit.open_image("turned.jpg")

# ---- Optimisation ---------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_each_parameter_has_its_optimizer_and_decay(optimizer):
    """In a wrapped and in a larger model as well."""
    config, model = vit.TrainConfig(optimizer=optimizer.lower(), weight_decay=0.3, lr=0.1, muon_lr=0.2), random_model()
    coder = {"encoder": model.blocks[0], "decoder": model.blocks[1], "head": torch.nn.Linear(32, 48)}
    kinds = {r"(attn\.qkv|attn\.proj|mlp\.fc.)\.weight$": (optimizer, 0.3, 0.2 if optimizer == "Muon" else 0.1),
             r"(patch_embed\.proj|head)\.weight$": ("AdamW", 0.3, 0.1), "": ("AdamW", 0.0, 0.1)}
    for net in (model, torch.nn.Sequential(model), torch.nn.ModuleDict(coder)):
        where = [(p, (type(o).__name__, g["weight_decay"], g["peak"])) for o in vit.make_optimizers(net, config)
                 for g in o.param_groups for p in g["params"]]
        assert len(where) == len(dict(where)) and dict(where) == {
            p: next(kinds[rule] for rule in kinds if re.search(rule, name)) for name, p in net.named_parameters()}

def test_clipping_acts_on_unscaled_gradients():
    """By two SGDs of rate 1: the way is the gradient. A NaN in one of them moves neither."""
    scaler, before, results = torch.amp.GradScaler("cpu", init_scale=2.0**16), random_model(), []
    for clip, factor in ((0.5, 1.0), (1e6, 1.0), (1.0, math.nan)):
        model = random_model()
        model.cls_token.register_hook(lambda grad: factor * grad)
        loss = 100 * model(random_images(4, 3, 16, 16)).square().mean()
        optimizers = [torch.optim.SGD(list(model.parameters())[i::2], lr=1.0) for i in (0, 1)]
        norm = vit.update(loss, model, optimizers, scaler, clip)
        way = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before.parameters())]).norm()
        results += [way.item(), norm.item()]
    assert results[0] == approx(0.5, rel=1e-3) and results[1] > 1
    assert results[2:4] == approx([results[1]] * 2, rel=1e-2)
    assert results[4] == 0 and math.isnan(results[5]) and scaler.get_scale() == 2.0**15

def plain_muon(W, grad, mean, lr, decay, parts=1):
    """One step in place, as the formulas stand, for one matrix or each of `parts` stacked ones."""
    for w, g, m in zip(W.chunk(parts), grad.chunk(parts), mean.chunk(parts)):
        m += 0.05 * (g - m)
        x = F.normalize(0.05 * g + 0.95 * m, dim=(0, 1))
        for _ in range(5):
            A = x @ x.T
            x = 3.4445 * x - 4.7750 * A @ x + 2.0315 * A @ A @ x
        w *= 1 - lr * decay
        w -= lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * x

@pytest.mark.skipif(not getattr(torch.optim, "Muon", None), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_pytorchs(dtype):
    """That one's products are in bf16: they agree to 2 % of the way that a matrix has gone."""
    start = [random_images(*shape) for shape in ((48, 16), (16, 48), (24, 24), (24, 24), (72, 24))]
    ours, theirs = ([W.clone() for W in start] for _ in range(2))
    muon = vit.Muon([{"params": ours, "chunks": [1] * len(ours)}], lr=0.1, weight_decay=0.5, dtype=dtype)
    twin = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.5)
    for n in range(4):
        for i, (a, b) in enumerate(zip(ours, theirs)):      # growing, so that the running mean matters
            a.grad = b.grad = (n + 1) * random_images(*a.shape, seed=10 * n + i)
        muon.step()
        twin.step()
    for a, b, W in zip(ours, theirs, start):
        assert (a - b).norm() < 2e-2 * (b - W).norm()
        assert_close(muon.state[a], twin.state[b])      # old checkpoints go on

@pytest.mark.parametrize("soft", [True, False])
def test_an_epoch_is_the_plain_recipe(monkeypatch, soft):
    """The second of three epochs: steps 4 to 7 of 12. Six warm up; the last is 30 degrees down."""
    def batch_of(images, labels, *ignored):     # `augment` without chance, mixed labels or not
        hot = F.one_hot(labels, 4).float()
        return images / 127.5 - 1, 0.7 * hot + 0.3 * hot.roll(-1, 1) if soft else labels
    monkeypatch.setattr(vit, "augment", batch_of)
    config = vit.TrainConfig(epochs=3, batch_size=16, warmup=0.5, muon_lr=0.05, lr=0.004, clip=0.5,
                             weight_decay=0.4, label_smoothing=0.2, seed=5)
    data, (model, plain, start) = noise_data(), (random_model(num_classes=4) for _ in range(3))
    run = vit.Run(model, vit.make_optimizers(model, config), NO_SCALER, [None])
    loss, accuracy, _ = vit.train_epoch(run, data, config, torch.float32)
    weights, right, losses, lengths = dict(plain.named_parameters()), [], [], []
    means = {name: torch.zeros_like(p) for name, p in weights.items() if name.startswith("blocks.") and p.ndim == 2}
    adamw = torch.optim.AdamW([{"params": p, "weight_decay": 0.4 * (name in ("patch_embed.proj.weight", "head.weight"))}
                               for name, p in weights.items() if name not in means])
    torch.manual_seed(5 + 2 * 1_000_003)
    for batch, share in zip(torch.randperm(64).split(16), (5 / 7, 6 / 7, 1, 0.9330127)):
        images, labels = batch_of(data.images[batch], data.labels[batch])
        logits, hot = plain(images), labels if soft else F.one_hot(labels, 4)
        losses.append(-((0.8 * hot + 0.2 / 4) * logits.log_softmax(1)).sum(1).mean())
        right.append((logits.argmax(1) == data.labels[batch]).float().mean())
        plain.zero_grad()
        losses[-1].backward()
        lengths.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for group in adamw.param_groups:
            group["lr"] = 0.004 * share
        adamw.step()
        for name, W in ((name, weights[name]) for name in means):
            plain_muon(W.data, W.grad, means[name], 0.05 * share, 0.4, 3 if "qkv" in name else 1)
    assert min(lengths) > 0.5 and max(lengths) > 1.2 * min(lengths)     # all clipped, not alike
    assert (loss, accuracy) == approx((sum(losses).item() / 4, sum(right).item() / 4), 1e-4)
    for (name, p), before in zip(model.named_parameters(), start.parameters()):
        off, way = p - weights[name], weights[name] - before
        off[32:64] *= "qkv.bias" not in name    # softmax ignores that of k: its gradient is noise
        assert off.norm() < 2e-3 * way.norm(), name

def test_schedules(monkeypatch):
    """Of the rate at its corners, the order of the images, and the alterations; mixing ends before the run does."""
    rate = [vit.learning_rate(step, 100, 10, peak=2.0, final=0.5) for step in range(101)]
    assert [rate[step] for step in (0, 10, 55, 100)] == approx([2 / 11, 2, (2 + 0.5) / 2, 0.5])
    assert rate[:11] == sorted(set(rate[:11])) and rate[10:] == sorted(set(rate[10:]), reverse=True)
    assert vit.learning_rate(0, 5, 0, peak=1.0) == 1.0
    assert [vit.augment_strength(epochs) for epochs in (1, 10, 40, 70, 300)] == [0, 0, 0.5, 1, 1]
    seen, model = [], random_model(num_classes=4)
    monkeypatch.setattr(vit, "augment", lambda x, y, data, *shares: seen.append((shares, y.tolist())) or interrupt())
    for done, augmented in ((0, True), (89, True), (90, True), (99, True), (0, False)):
        run = vit.Run(model, [], NO_SCALER, [None] * done)
        with pytest.raises(KeyboardInterrupt):
            vit.train_epoch(run, noise_data(augmented), vit.TrainConfig(epochs=100, batch_size=32), torch.float32)
    assert [shares for shares, _ in seen] == [(1, 0.5), (1, 0.5), (1, 0), (1, 0), (0, 0)]
    assert seen[0][1] != seen[1][1] and seen[0][1] == seen[4][1]    # an order for each epoch

def test_precision_and_device(monkeypatch):
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for flags, dtype in (({"amx_bf16": True}, bf16), ({"avx512_bf16": True}, bf16), ({"avx2": True}, fp32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False} | flags, raising=False)
        assert vit.pick_precision("auto", CPU) == dtype
    for capability, dtype in (((7, 5), fp16), ((8, 0), bf16), ((9, 0), bf16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert vit.pick_precision("auto", torch.device("cuda")) == dtype
    assert vit.pick_precision("auto", torch.device("mps")) == fp32 and vit.pick_precision("fp16", CPU) == fp16
    for cuda_there, mps_there, name in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps_there)
        assert vit.pick_device("auto").type == name

# ---- Training -------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", ["--amp fp16", "--amp bf16", "--amp off", *(pytest.param(
    f"--device cuda {extra}", marks=gpu) for extra in ("--amp fp16", "--amp bf16", "--amp bf16 --compile"))])
def test_every_precision_trains(monkeypatch, options):
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 160)
    assert cli(f"{SHAPES} --epochs 4 {options}") == 0
    checkpoint = vit.load_checkpoint("vit.pt")
    losses = [row["train_loss"] for row in checkpoint["history"]]
    assert losses[-1] < losses[0] - 0.3 and bool(checkpoint["scaler"]) == ("fp16" in options)

def test_the_way_through_the_command_line(capsys):
    """And images of every size are drawn."""
    assert cli(f"{SHAPES} --epochs 1", "train --resume vit.pt --epochs 2") == 0     # a run may grow longer
    lines = capsys.readouterr().out.splitlines()
    assert "64 training and 20 test images" in " ".join(lines) and "test accuracy" in lines[-3]
    assert vit.load_checkpoint("vit.pt")["epoch"] == 2 and vit.open_image("vit.png").size[0] > 500
    sizes = {"my cat": (300, 200), "tall": (32, 4000), "dot": (1, 1), "large": (8000, 6000)}
    for name, size in sizes.items():
        Image.new("RGB", size, "teal").save(f"{name}.jpg")
    look = "viz --ckpt vit.pt --image test:7"
    assert cli(look) == 0 and capsys.readouterr().out.endswith("wrote test_7_attention.png\n")
    assert cli(f"{look} --out again.png", f"{look} --target 'blue ring' --out blue.png",
               f"{look} --target 'red disc' --out red.png", "viz --ckpt vit.pt",
               *(f"viz --ckpt vit.pt --image '{name}.jpg'" for name in sizes)) == 0
    assert Path("again.png").read_bytes() == Path("test_7_attention.png").read_bytes()
    assert Path("blue.png").read_bytes() != Path("red.png").read_bytes()
    drawn, error = {vit.open_image(f"{name}_attention.png").size for name in sizes}, capsys.readouterr().err
    assert drawn == {(1600, 900)} and vit.open_image("learnt.png").size == (1600, 540)
    assert "dot.jpg is enlarged" in error and error.count("\n") == 1 and not list(Path().glob("*.tmp"))

def test_a_cnn_in_the_same_loop(capsys):
    """torchvision's ResNet-18 but for its stem: trained, tested, and not to be drawn."""
    model, image = vit.make_model("resnet18", vit.ViTConfig(num_classes=7)), torch.zeros(1, 3, 32, 32)
    assert model(image).shape == (1, 7) and model.layer1(model.maxpool(model.conv1(image))).shape[2:] == (32, 32)
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 993 * 513 - 64 * 3 * (49 - 9)
    assert cli(f"{SHAPES} --epochs 1 --model resnet18") == 0
    assert "in batches of 16, AdamW, cpu" in capsys.readouterr().out
    assert cli("eval --ckpt vit.pt", "viz --ckpt vit.pt --image test:0") == 2

@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler")
def test_compiled_it_learns_the_same():
    command = f"{SHAPES} --epochs 1 --amp off --out"
    assert cli(f"{command} a.pt", f"{command} b.pt --compile", "viz --ckpt b.pt --image test:0") == 0   # it is plain
    plain, compiled = (vit.load_checkpoint(name)["history"][0]["test_loss"] for name in ("a.pt", "b.pt"))
    assert plain == approx(compiled, rel=1e-3)

def test_predict_and_evaluate_in_batches():
    """In order, without dropout, with a short batch at the end; also a model whose logits are the pixels."""
    model, images, sizes = random_model(dropout=0.5).train(), noise_data().images[:23], []
    model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    logits = vit.predict(model, images, 0.5, 0.25, torch.float32, 5)
    assert sizes == [5, 5, 5, 5, 3] and logits.std(0).min() > 1e-3
    assert_close(logits, model.eval()(vit.normalise(images, 0.5, 0.25)))
    logits = torch.tensor([[9, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0.0]])
    pixels, labels = (logits[:, :, None, None] * 20).to(torch.uint8), torch.tensor([0, 1, 1, 2, 2])
    data = vit.Data(None, None, pixels, labels, list("abc"), torch.tensor(0.0), torch.tensor(20 / 255), False)
    loss, accuracy = vit.evaluate(torch.nn.Flatten(), data, torch.float32, 2)
    assert (loss, accuracy) == approx((F.cross_entropy(logits, labels).item(), 0.6), rel=1e-4)

def test_eval_counts(trained, monkeypatch, capsys):
    """The log's figure; accuracy by class and mistakes by hand; some of the classes; a class unknown."""
    def evaluate(options="", code=0):
        assert cli(f"eval --ckpt '{trained}' --device cpu {options}") == code
        return "".join(capsys.readouterr())
    assert f"test accuracy {vit.load_checkpoint(trained)['history'][-1]['test_accuracy']:.2%}" in evaluate()
    images, labels, _ = vit.make_shapes(20, 16, seed=1)
    for i in (0, 1, 11):                                        # red disc and red ring only
        folder = Path("some", vit.SHAPE_CLASSES[labels[i]])
        folder.mkdir(exist_ok=True, parents=True)
        Image.fromarray(images[i].permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    out = evaluate("--data some")
    assert "on 3 images" in out and "red ring" in out and "blue disc" not in out.split("mistakes")[0]
    make_folder("some", classes=["cow"], splits=[""])
    assert "cow" in evaluate("--data some", code=2)
    guesses = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 2, 3, 5, 5, 6, 1, 8, 1])
    monkeypatch.setattr(vit, "predict", lambda *args, **options: F.one_hot(guesses, 10).float())
    assert {"test accuracy 80.00% on 20 images of shapes", "   50.0%  red ring", "  100.0%  red disc",
            "       1  red ring taken for red disc"} <= set(evaluate().splitlines())

def test_a_new_run_keeps_what_is_there(monkeypatch, capsys):
    """Other files, older checkpoints, and what another run writes meanwhile. The seed fixes what is learnt."""
    command, path, old = f"{SHAPES} --epochs 1 --out cat.pt", Path("cat.pt"), [Path(f"cat.old{n}.pt") for n in (2, 3, 4)]
    for name in ("cat.png", "cat.csv"):
        Path(name).write_text("mine")
    contents, others, real = [], [f"{command} --seed 7"], vit.train_epoch
    for _ in range(2):
        assert cli(command) == 0
        contents.append(path.read_bytes())
    assert Path("cat.old1.png").read_text() == Path("cat.old1.csv").read_text() == "mine"
    assert "cat.pt was there, not of this run; it is now cat.old2.pt" in capsys.readouterr().out
    monkeypatch.setattr(vit, "train_epoch", interrupt)          # nothing is moved for a run that saves nothing
    assert cli(command) == 130 and path.read_bytes() == contents[1] and not old[1].exists()
    monkeypatch.setattr(vit, "train_epoch", lambda run, *args:
                        run.history and others and cli(others.pop()) or real(run, *args))
    assert cli(f"{command} --epochs 2") == 0                    # of epoch 1: old4, renamed by the other
    assert [file.read_bytes() for file in old[:2]] == contents and Path("cat.old3.csv").exists()
    runs = [vit.load_checkpoint(file) for file in (*old, Path("cat.old5.pt"), path)]
    assert [(run["train"].seed, run["epoch"]) for run in runs] == [(0, 1), (0, 1), (0, 1), (7, 1), (0, 2)]
    a, b, c = (run["model"]["blocks.0.mlp.fc1.weight"] for run in (runs[0], runs[1], runs[3]))
    assert torch.equal(a, b) and not torch.equal(a, c)

def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, capsys):
    monkeypatch.setattr(vit.ViT, "initialise", lambda self: self.head.bias.data.fill_(torch.nan))
    assert cli(f"{SHAPES} --epochs 1 --amp off") == 2
    error = capsys.readouterr().err
    assert re.search("loss is nan at step [0-3];", error) and "--lr" in error and not Path("vit.pt").exists()

def test_ctrl_c_leaves_the_last_checkpoint(monkeypatch, capsys):
    """A log that cannot be written ends no run."""
    Path("vit.csv").mkdir()
    steps = iter([vit.train_epoch])
    monkeypatch.setattr(vit, "train_epoch", lambda *args: next(steps, interrupt)(*args))
    for command, says in ((f"{SHAPES} --epochs 3", "train --resume vit.pt"),
                          ("train --resume vit.pt --out other.pt", "python vit.py train --resume vit.pt"),
                          (f"{SHAPES} --out other.pt", "nothing is saved yet")):
        assert cli(command) == 130
        out = capsys.readouterr().out
        assert says in out.splitlines()[-1]
        assert ("note: vit.csv cannot be written: Is a directory;" in out) == ("--epochs" in command)
    assert vit.load_checkpoint("vit.pt")["epoch"] == 1

# ---- Checkpoints ----------------------------------------------------------------------------------
KILL = """import os, signal, sys, vit
real, calls, vit.augment_strength = vit.Path.write_bytes, [], lambda epochs: 0.5
def write(path, content):           # the third checkpoint
    calls.append(path)
    real(path, content[:9999] if len(calls) == 3 else content)
    len(calls) == 3 and os.kill(os.getpid(), signal.SIGKILL)
vit.Path.write_bytes = write
sys.exit(vit.main())"""

def start(*program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options):
    """Python in a process of its own."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}
    return subprocess.Popen([sys.executable, *program], text=True, env=env, stdout=stdout, stderr=stderr, **options)

@on_linux
def test_a_killed_run_resumes_exactly(monkeypatch):
    """When a checkpoint is half written: the last whole one is there, and from it all goes on bit for bit."""
    make_folder("pets", classes="abcdefghij")
    command = f"{SHAPES} --data pets --epochs 4 --dropout 0.1 --drop-path 0.1 --amp fp16 --out"
    process = start("-c", KILL, *command.split(), "cut.pt")
    monkeypatch.setattr(vit, "augment_strength", lambda epochs: 0.5)
    assert cli(f"{command} whole.pt") == 0 and (process.communicate()[1], process.returncode) == ("", -9)
    assert vit.load_checkpoint("cut.pt")["epoch"] == 2 and len(list(Path().glob("*.tmp"))) == 1
    assert cli("train --resume cut.pt") == 0
    whole, cut = (vit.load_checkpoint(name) for name in ("whole.pt", "cut.pt"))
    assert whole["epoch"] == cut["epoch"] == 4 and whole["scaler"] == cut["scaler"] != {}
    assert_close(*([run["model"], *(o["state"] for o in run["optimizers"])] for run in (whole, cut)), **EXACT)
    for a, b in zip(whole["history"], cut["history"], strict=True):
        assert all(a[key] == b[key] for key in a if "second" not in key)
    rows = list(csv.DictReader(Path("cut.csv").read_text().splitlines()))           # the log goes on as well
    assert [{key: float(value) for key, value in row.items()} for row in rows] == cut["history"]

@on_linux
def test_a_full_disk_and_a_full_memory(monkeypatch, capsys):
    """A limit on the size of a file stands for the disk. One sentence; and all that was there stays as it is."""
    import resource
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 160)
    assert cli(f"{SHAPES} --epochs 1", look := "viz --ckpt vit.pt --image test:0") == 0
    files = {path: path.read_bytes() for path in Path().iterdir()}
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 3 * 10**8
    for kind, most, command, says in (
            (resource.RLIMIT_FSIZE, 50_000, "train --resume vit.pt --epochs 2", "vit.pt cannot be written"),
            (resource.RLIMIT_FSIZE, 50_000, f"{SHAPES} --epochs 1", "vit.pt cannot be written"),
            (resource.RLIMIT_FSIZE, 50_000, look, "test_0_attention.png cannot be written"),
            (resource.RLIMIT_AS, memory, f"{SHAPES} --image-size 64 --patch-size 2 --batch-size 160", "--batch-size")):
        limits = resource.getrlimit(kind)
        resource.setrlimit(kind, (most, limits[1]))
        try:
            code = cli(command)
        finally:
            resource.setrlimit(kind, limits)
        error = capsys.readouterr().err
        assert code == 2 and error.startswith("vit.py: ") and says in error and error.count("\n") == 1
        assert {path: path.read_bytes() for path in Path().iterdir()} == files

@pytest.mark.parametrize("part, value, says", [
    ("vit", {"dim": 64}, "size mismatch"), ("vit", {"depth": 256, "dim": 16384, "num_heads": 1}, "Missing key"),
    ("vit", {"dim": "32"}, ""), ("vit", {"width": 3}, ""), ("train", {"model": "resnet18"}, "Missing key"),
    ("format", 2, "format is 2"), ("format", None, "None"), ("mean", [0.5], "invalid"),
    *(("model", {name: value}, says) for name, value, says in (     # and what --init cannot read
        ("blocks.0.ls1.gamma", torch.ones(32), "ls1.gamma"), ("dist_token", torch.ones(1, 1, 32), "dist_token"),
        ("reg_token", torch.ones(1, 4, 32), "reg_token"), ("head.mlp.0.weight", torch.ones(2, 32), "head.mlp.0"),
        ("patch_embed.proj.weight", torch.ones(32, 1, 4, 4), "32, 1, 4, 4"), ("norm.weight", None, "norm.weight"),
        ("pos_embed", torch.ones(1, 15, 32), "pos_embed"), ("mask_token", PAYLOAD, "more than tensors"),
        ("patch_embed.proj.weight", None, "patch_embed.proj")))])
def test_a_file_whose_parts_do_not_fit(trained, capsys, part, value, says):
    """Refused before a model is built, however large the sizes that it declares: a checkpoint, and bare weights."""
    file = torch.load(trained, weights_only=True)
    file[part] = file[part] | value if isinstance(value, dict) else value
    file["model"] = {name: weight for name, weight in file["model"].items() if weight is not None}
    for option, content in (("--resume", file), ("--init", file["model"]))[:1 + (part == "model")]:
        torch.save(content, "x.pt")
        assert cli(f"train --data shapes --epochs 2 {option} x.pt") == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1 and "x.pt is not a whole" in error
    assert not Path("was-run").exists()

def test_a_wrapped_model_is_accepted_and_a_damaged_one_runs_no_code(trained):
    weights = torch.load(trained, weights_only=True)["model"]
    altered(trained, "x.pt", model={"module._orig_mod." + name: weight for name, weight in weights.items()})
    assert_close(dict(vit.restore_model("x.pt")[1].state_dict()), dict(weights), **EXACT)
    torch.load(altered(trained, "x.pt", classes=PAYLOAD), weights_only=False)["classes"].close()
    Path("was-run").unlink()                            # so the payload is live
    whole, middle = trained.read_bytes(), trained.stat().st_size // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:]
    for content in (Path("x.pt").read_bytes(), flipped, whole[:-100], b""):
        Path("x.pt").write_bytes(content)
        with pytest.raises(vit.InputError, match="not a whole" + ".*damaged" * (content == flipped)):
            vit.load_checkpoint("x.pt")
    assert not Path("was-run").exists()

TWO = """import os, sys, vit
vit.SHAPE_COUNTS.update(train=64, test=20)
vit.augment = lambda images, labels, data, *shares: (vit.normalise(images, data.mean, data.std), labels)
def epoch(run, *rest, real=vit.train_epoch):
    if run.history and os.environ["RANK"] == "1":
        os._exit(9)                 # in the second epoch one of them dies
    return real(run, *rest)
vit.train_epoch = epoch
sys.exit(vit.main())"""

def test_two_processes_are_one(monkeypatch, capsys):
    """The weights after four steps are those of one process; then one dies, which ends both; a single one goes on."""
    Path("two.py").write_text(TWO)
    options = *SHAPES.split(), "--amp=off", "--epochs=2"
    both = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "two.py", *options)
    monkeypatch.setattr(vit, "augment", lambda images, labels, data, *shares: (
        vit.normalise(images, data.mean, data.std), labels))
    with monkeypatch.context() as patch:
        patch.setattr(vit, "train_epoch", lambda run, *rest, real=vit.train_epoch:
                      interrupt() if run.history else real(run, *rest))
        assert vit.main([*options, "--out=one.pt"]) == 130
    out, error = both.communicate(timeout=100)
    assert both.returncode == 1 and out.count("data    shapes") == 1, error         # process 0 alone prints
    one, two = (vit.load_checkpoint(name) for name in ("one.pt", "vit.pt"))
    assert_close(two["model"], one["model"], atol=1e-4, rtol=0)
    assert [[row[key] for key in row if "second" not in key] for row in two["history"]] == [
        [approx(row[key], abs=1e-4) for key in row if "second" not in key] for row in one["history"]]
    assert cli("train --resume vit.pt", "viz --ckpt vit.pt --image test:1") == 0
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert cli(f"{SHAPES} --epochs 1") == 2 and "16 does not divide by 3 processes" in capsys.readouterr().err

# ---- Beginning from other weights -----------------------------------------------------------------
def begin(file, size):
    """The model of a run that begins from a file, before its first step, with the head of the file."""
    typed = dict(data="shapes", batch_size=16, device="cpu", init=file, image_size=size)
    options, config, checkpoint = vit.read_options(typed)
    run, data, _ = vit.prepare(config, options, checkpoint)
    net = vit.load_checkpoint(file, foreign=True)["net"]
    assert not torch.equal(run.model.head.weight, net.head.weight)      # it began anew
    run.model.head = net.head
    return run.model.eval(), data

@pytest.mark.parametrize("legacy", [False, True])
def test_weights_of_torchvision(capsys, legacy):
    """Logits equal, from a zip or an old file; sizes, mean and std are its own; another grid is resized."""
    theirs, images = randomise(VisionTransformer(16, 4, 2, 1, 64, 128, num_classes=10), scale=0.1), random_images(2, 3, 16, 16)
    weights = {f"module.{name}": weight for name, weight in theirs.state_dict().items()}
    file = {"state_dict": weights} | ({} if legacy else {"mean": [0.5] * 3, "std": [0.4] * 3})
    torch.save(file, "x.pth", _use_new_zipfile_serialization=not legacy)
    model, data = begin("x.pth", 16)
    assert model.config == vit.ViTConfig(image_size=16, dim=64, depth=2, num_heads=1, mlp_ratio=2.0)
    assert_close(model(images), theirs(images), atol=1e-4, rtol=1e-4)
    assert_close(data.mean.flatten(), torch.tensor([0.485, 0.456, 0.406] if legacy else [0.5] * 3))
    out = capsys.readouterr().out
    assert ("ImageNet" if legacy else "of the file") in out and "a new head" in out and "--optimizer adamw" in out
    assert torch.equal(begin("x.pth", 32)[0].pos_embed, vit.resize_positions(model.pos_embed, model.grid, 8, 8))
    assert "(4, 4) for a grid of (8, 8)" in capsys.readouterr().out

@pytest.mark.slow
@pytest.mark.parametrize("name, size", [("vit_tiny_patch16_224", 224), ("deit_small_patch16_224", 224),
                                        ("vit_tiny_patch16_224", 160), ("deit_small_patch16_224", 256)])
def test_weights_of_timm(name, size):
    """Random ones, without a network; for another size against timm's own resampling."""
    theirs = randomise(pytest.importorskip("timm").create_model(name, num_classes=10), scale=0.1)
    torch.save({"model": theirs.state_dict()}, "x.pth")
    if size != 224:
        theirs.set_input_size(img_size=size)
    images = random_images(2, 3, size, size)
    assert_close(begin("x.pth", size)[0](images), theirs(images), atol=1e-4, rtol=1e-4)

def whole_and_cut(command, monkeypatch):
    """The checkpoints of a run of three epochs, and of the same run, stopped after two and resumed."""
    real = vit.train_epoch
    assert cli(f"{command} --epochs 3 --out whole.pt") == 0
    with monkeypatch.context() as patch:
        patch.setattr(vit, "train_epoch", lambda run, *rest: real(run, *rest) if len(run.history) < 2 else interrupt())
        assert cli(f"{command} --epochs 3 --out cut.pt") == 130
    Path("start.pt").unlink(missing_ok=True)        # --init is read once
    assert cli("train --resume cut.pt") == 0
    whole, cut = map(vit.load_checkpoint, ("whole.pt", "cut.pt"))
    assert_close(cut["model"], whole["model"], **EXACT)
    assert_close([o["state"] for o in cut["optimizers"]], [o["state"] for o in whole["optimizers"]], **EXACT)
    assert_close(cut["best"] or {}, whole["best"] or {}, **EXACT)
    assert [row.get("val_loss") for row in cut["history"]] == [row.get("val_loss") for row in whole["history"]]
    return whole

@pytest.mark.parametrize("options", ["adamw", "muon --patience 3"])
def test_a_fine_tuned_run(trained, monkeypatch, capsys, options):
    """The frozen keep their weights to the bit, the same classes their head; resume is exact, with --patience too."""
    Path("start.pt").write_bytes(trained.read_bytes())
    options = f"--init start.pt --freeze 1 --layer-decay 0.5 --optimizer {options}"
    whole = whole_and_cut(f"train --data shapes --batch-size 16 --device cpu {options}", monkeypatch)
    old = vit.load_checkpoint(trained)
    assert "its own head, mean and std of the file" in capsys.readouterr().out
    assert torch.equal(whole["mean"], old["mean"]) and bool(whole["best"]) == ("patience" in options)
    same = {name for name, weight in whole["model"].items() if torch.equal(weight, old["model"][name])}
    assert same == {n for n in old["model"] if n.startswith(("patch_embed", "cls_token", "pos_embed", "blocks.0."))}

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_by_layer(optimizer):
    """Of three blocks: the head 1, the last block 1/2, ... the patch embedding 1/16."""
    model, config = random_model(depth=3), vit.TrainConfig(optimizer=optimizer, layer_decay=0.5)
    groups = [group for o in vit.make_optimizers(model, config) for group in o.param_groups]
    peak = {p: group["peak"] for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        layer = int(name[7]) + 1 if name.startswith("blocks") else 4 * name.startswith(("norm", "head"))
        muon = optimizer == "muon" and layer in (1, 2, 3) and p.ndim == 2
        assert peak[p] == pytest.approx((config.muon_lr if muon else config.lr) / 2 ** (4 - layer)), name
    plain = vit.make_optimizers(model, vit.TrainConfig(optimizer=optimizer))
    assert [len(o.param_groups) for o in plain] == [2, 1][:len(plain)]      # as ever

def test_held_out_images_end_a_run(monkeypatch, capsys):
    """eval and viz take the best weights, resume goes on from the last; test images choose nothing."""
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 200)
    losses, seen = iter([3.0, 2.0, 2.5, 2.1, 2.2, 2.3]), []

    def evaluate(model, data, dtype, batch_size, part=()):
        seen.append(len(part[1]) if part else 0)
        return (next(losses), 0.5) if part else (9 / len(seen), len(seen) / 100)    # ever better
    monkeypatch.setattr(vit, "evaluate", evaluate)
    assert cli(f"{SHAPES} --epochs 9 --patience 3") == 0
    out, weights = capsys.readouterr().out, torch.load("vit.pt", weights_only=True)
    assert seen == [0, 20] * 5 and "180 training" in out and "20 held out" in out
    assert "\n    5  " in out and "test accuracy 3.00% after epoch 2, the best on held-out images" in out
    assert Path("vit.csv").read_text().splitlines()[0].endswith("seconds,val_loss,val_accuracy")
    checkpoint, model, _, _ = vit.restore_model("vit.pt")
    assert "the weights of epoch 2" in capsys.readouterr().out and checkpoint["epoch"] == 2
    assert_close(dict(model.state_dict()), dict(weights["best"]), **EXACT)
    assert not torch.equal(weights["best"]["head.weight"], weights["model"]["head.weight"])
    assert cli("viz --ckpt vit.pt --image test:1", "eval --ckpt vit.pt --device cpu", "train --resume vit.pt") == 0
    assert [row["epoch"] for row in vit.load_checkpoint("vit.pt")["history"]] == [1, 2, 3, 4, 5, 6]

def test_a_tenth_of_each_class_is_held_out():
    labels = torch.tensor([3, 0, 1] * 7 + [0] * 43 + [2] + [3] * 93)
    held, again, other = (vit.hold_out(labels, seed) for seed in (0, 0, 1))
    assert labels[held].bincount(minlength=4).tolist() == [5, 1, 0, 10]     # of a single one, none
    assert torch.equal(held, again) and not torch.equal(held, other)

# ---- Seeing ---------------------------------------------------------------------------------------
def test_rollout_by_hand():
    """Block 1: both patches look at patch 2. Block 2: the class token looks at patch 1."""
    A1, A2 = torch.tensor([[[[[1.0, 0, 0], [0, 0, 1], [0, 0, 1]]]], [[[[0, 1, 0], [0, 1, 0], [0, 0, 1]]]]])
    R = vit.rollout_matrix([A1, A2])
    assert_close(R[0, 0], torch.tensor([0.5, 0.25, 0.25]))
    assert_close(R.sum(-1), torch.ones(1, 3))
    assert_close(vit.attention_rollout([A1, A2]), torch.tensor([[0.25, 0.25]]))
    heads = torch.rand(2, 4, 5, 5).softmax(-1)
    assert_close(vit.rollout_matrix([heads]), vit.rollout_matrix([heads.mean(1, keepdim=True)]))
    even = vit.rollout_matrix([torch.full((1, 3, 65, 65), 1 / 65)] * 6)[0, 0]       # it stays flat
    assert_close(even, torch.tensor([0.0307692] + [0.0151442] * 64), atol=1e-6, rtol=0)
    assert_close(vit.times_uniform(even[1:]), torch.ones(64))
    assert torch.equal(vit.times_uniform(torch.zeros(2, 9)), torch.zeros(2, 9))     # and zeros stay zeros

def test_relevance_by_hand():
    """Two blocks of one head; then one of two heads, which are cut off before the mean."""
    A1, A2 = torch.tensor([[[[[0.1, 0.3, 0.6], [0, 0, 0.4], [0, 0, 0]]]], [[[[0, 0.6, 0], [0, 0, 0], [0, 0, 0]]]]])
    R = vit.relevance_matrix([A1, A2], [torch.ones(1, 1, 3, 3)] * 2)
    assert_close(R[0, 0], torch.tensor([1.1, 0.9, 0.84]))
    A, G = torch.zeros(2, 1, 2, 3, 3)
    A[0, :, 0], G[0, :, 0] = torch.tensor([[[0.2, 0.6, 0.2], [0.2, 0.2, 0.6]], [[0, 1, -5], [1, -1, 2]]])
    assert_close(vit.relevance_matrix([A], [G])[0, 0], torch.tensor([1.1, 0.3, 0.6]))

@pytest.mark.parametrize("dtype, training", [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)])
def test_relevance_of_a_model(dtype, training):
    """In any dtype and mode: each gradient meets its block's weights, images do not mix. The mode is kept."""
    exact, model = (random_model(depth=3, dropout=0.5).to(dtype) for _ in range(2))
    model, images = model.train(training).requires_grad_(False), random_images(3, 3, 16, 16)
    logits, attention = exact.float()(images, return_attention=True)
    gradients = torch.autograd.grad(logits[1, 2], attention)
    expected = vit.relevance_matrix(attention, gradients)[1:2, 0, 1:]
    alone, other, together = (vit.relevance(model, *args) for args in (
        (images[1:2], 2), (images[1:2], 5), (images, torch.tensor([1, 2, 3]))))
    assert together.shape == (3, 16) and together.dtype == torch.float32 and not together.requires_grad
    for result in (alone, together[1:2]):
        assert_close(result, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone, other) and model.head.weight.dtype == dtype
    for size, target in ((16, 99), (17, 3)):                # no such class; no whole patches
        with pytest.raises((RuntimeError, ValueError)):
            vit.relevance(model, random_images(2, 3, size, size), target)
    assert all(module.training == training for module in model.modules())

def test_attention_distance():
    up = torch.eye(7)                                           # on a grid of 3 x 2, each looks up
    up[3:] = torch.eye(7)[1:5]
    for A, grid, expected in ((torch.full((65, 65), 1 / 65), (8, 8), 16.5459), (up, (3, 2), 4 * 4 / 6),
                              (torch.full((5, 5), 0.2), (2, 2), 3.41421), (torch.eye(5), (2, 2), 0.0)):
        distance = vit.attention_distance([A.expand(2, 3, *A.shape)] * 2, grid, 4)
        assert_close(distance, torch.full((2, 3), expected), atol=1e-4, rtol=0)

def mass_and_pointing(maps, masks):
    """Mass of (n, N-1) maps in the masks (n, S, S), over the masks' share (1 by chance); rate of peaks that touch."""
    share = F.avg_pool2d(masks[:, None].float(), 4).flatten(1)                      # (n, N-1)
    mass = (maps / maps.sum(1, keepdim=True) * share).sum(1) / share.mean(1)
    return mass.mean().item(), (share.gather(1, maps.argmax(1, keepdim=True)) > 0).float().mean().item()

@torch.no_grad()
def probability_without(model, x, labels, order):
    """Mean probability of the labels when the first 0, 10, ... 90 % of the patches in `order` (n, N-1) are left out:
    their tokens, as black squares would be pictures of something too (2204.08945)."""
    tokens, steps, P = model.patch_embed(x) + model.pos_embed[:, 1:], [], order.shape[1]
    cls = (model.cls_token + model.pos_embed[:, :1]).expand(len(x), -1, -1)
    for tenth in range(10):
        kept = order[:, round(P * tenth / 10):, None].expand(-1, -1, tokens.shape[2])
        out = torch.cat([cls, tokens.gather(1, kept)], dim=1)
        for block in model.blocks:
            out, _ = block(out)
        steps.append(model.head(model.norm(out[:, 0])).softmax(1).gather(1, labels[:, None]).mean())
    return torch.stack(steps).mean().item()

def test_maps_find_the_object(monkeypatch):
    """Trained for seconds, a model looks at the figure: far more than untrained, or than a blob in the middle would."""
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 1600)
    assert cli(f"{SHAPES} --epochs 5 --image-size 32 --dim 64 --depth 3 --batch-size 32") == 0
    checkpoint, model, mean, std = vit.restore_model("vit.pt")
    images, _, masks = vit.make_shapes(200, 32, seed=1)
    x, results = vit.normalise(images, mean, std), {}
    torch.manual_seed(0)
    for name, net in (("trained", model), ("untrained", vit.ViT(checkpoint["vit"]).eval())):
        logits, attention = net(x, return_attention=True)
        results[name, "cls"] = mass_and_pointing(attention[-1].mean(1)[:, 0, 1:], masks)
        results[name, "relevance"] = mass_and_pointing(vit.relevance(net, x, logits.argmax(1)) + 1e-12, masks)
    middle = torch.exp(-((torch.arange(8) - 3.5) ** 2) / 8)
    blob = mass_and_pointing(torch.outer(middle, middle).flatten().expand(200, -1), masks)
    for name, least in (("cls", 0.65), ("relevance", 0.85)):        # seeds 0 to 3: 0.85 to 0.99, 0.95 to 0.99
        mass, pointing = results["trained", name]
        assert mass > 1.5 * blob[0] and mass > 2 * results["untrained", name][0], results
        assert pointing > least > blob[1] + 0.1, results
    labels = model(x).argmax(1)
    best = vit.relevance(model, x, labels).argsort(descending=True)
    first, last, chance = (probability_without(model, x, labels, order) for order in
                           (best, best.flip(1), torch.rand(200, 64).argsort()))
    assert first < chance - 0.1 and last > chance + 0.03, (first, last, chance)      # what it ranks highest counts

def test_a_map_of_zeros_and_odd_sizes_can_be_drawn():
    """Weights of zero: uniform attention, relevance all zero. Also one head, and many blocks."""
    model, photo = random_model(depth=9, num_heads=1, num_classes=3), Image.new("RGB", (90, 30), "red")
    model.load_state_dict({name: torch.zeros_like(weight) for name, weight in model.state_dict().items()})
    vit.draw_picture(photo, model, 0, 1, ["a", "b $x", "c" * 99])[0].savefig("p.png")
    assert vit.open_image("p.png").size == (1600, 900)

# ---- The command line -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def workshop(tmp_path_factory, trained):
    """A folder with a small checkpoint and files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("workshop")
    for name, *layout in (("good",), ("hollow",), ("bad",), ("lonely", ["cat"]), ("flat", ["cat"], ["photos"]),
                          ("odd", ["cat", "dog"], ["train"]), ("odd", ["cat", "cow"], ["test"])):
        make_folder(root / name, *layout)
    for folder in ("hollow/train/bird", "bare/train", "bare/test"):
        (root / folder).mkdir(parents=True)
    Image.effect_noise((99, 99), 80).save(root / "whole.jpg")
    Image.new("F", (9, 9), 0.5).save(root / "float.tif")
    for name, content in (("vit.pt", trained.read_bytes()), ("text.png", b"hello"), ("empty.png", b""), ("file", b""),
                          ("cut.jpg", (root / "whole.jpg").read_bytes()[:2000]),
                          ("bad/train/dog/1.png", b"not an image"), ("bad/train/dog/3.png", b"not an image")):
        (root / name).write_bytes(content)
    train, cnn = torch.load(trained, weights_only=True)["train"], vit.make_model("resnet18", vit.ViTConfig())
    altered(trained, root / "longer.pt", train=train | {"epochs": 3})
    altered(trained, root / "cnn.pt", train=train | {"model": "resnet18"}, model=cnn.state_dict())
    return root

BAD = {     # the beginning of a command: how it goes on, and what the sentence names
    "": [("", "train"), ("fly", "fly"), ("eval", "--ckpt")],
    "train ": [("--epoch 3", "--epoch"), ("--epochs many", "many"), ("--epochs 0", "--epochs"), ("--epochs -3", "-3"),
        ("--batch-size 0", "--batch-size"), ("--lr nan", "--lr"), ("--muon-lr inf", "--muon-lr"),
        ("--warmup 1.5", "--warmup"), ("--seed -1", "--seed"), ("--optimizer sgd", "sgd"), ("--amp fp8", "fp8"),
        ("--image-size 30", "--patch-size 4"), ("--dim 100", "--num-heads 3"), ("--variant XXL", "XXL"),
        ("--mlp-ratio 0.1 --dim 9", "--mlp-ratio"), ("--model cnn", "cnn"), ("--label-smoothing 1", "--label"),
        ("--device cuda", "--device cuda"), ("--out no/where.pt", "no/where.pt"), ("--out file/x.pt", "file"),
        ("--out good", "good"), (f"--out {'x' * 300}.pt", "too long"), ("--out vit.pt/", "vit.pt/")],
    "train --data ": [("nowhere", "nowhere"), ("''", "CLASS"), ("flat", "train/CLASS"), ("bare", "bare/train"), ("hollow", "bird"),
        ("good", "--batch-size 128"), ("lonely --batch-size 2", "one class"), ("odd --batch-size 2", "cow"),
        ("bad --batch-size 2", "2 of 16 files cannot be read as images: bad/train/dog/1.png, bad/train/dog/3.png;"),
        ("shapes --image-size 512", "256"), ("good --batch-size 2 --image-size 65536 --patch-size 512", "192 GiB")],
    "train --resume ": [("missing.pt", "missing.pt"), ("text.png", "text.png"), ("''", "checkpoint"),
        ("vit.pt", "--epochs"), ("vit.pt --epochs 3 --seed 4 --dim 64", "--dim is 32, --seed is 0;"),
        ("vit.pt --epochs 3 --data good", "--data"), ("longer.pt --epochs 1", "cannot be made shorter")],
    "eval --ckpt ": [("missing.pt", "missing.pt"), ("vit.pt --data good", "good"), ("vit.pt --data void", "void")],
    "viz --ckpt ": [("cnn.pt --image whole.jpg", "no attention to draw"), ("missing.pt --image test:0", "missing.pt"),
        ("good --image test:0", "good"), ("text.png --image whole.jpg", "text.png"), ("vit.pt --out x.pdf", "x.pdf"),
        ("vit.pt --target cow", "cow"), ("vit.pt --target 'red disc'", "--image")],
    "viz --ckpt vit.pt --image ": [("float.tif", "grey"), ("test:1 --data nowhere", "nowhere"), ("''", "image"),
        ("missing.png", "missing.png"), ("text.png", "text.png"), ("empty.png", "empty.png"), ("cut.jpg", "cut.jpg"),
        ("good", "good"), ("test:20", "test:19"), ("test:-1", "test:-1"), (f"{'x' * 300}.png", "too long"),
        ("test:0 --out x.png/", "x.png/"), ("text.png --out text.png", "same"),
        ("test:0 --data good --out good/test/cat/0.png", "same")],
    "viz --ckpt vit.pt --image whole.jpg ": [("--out no/x.png", "no/x.png"), ("--out file/x.png", "file"),
        ("--out x.jpg", "x.jpg"), ("--out whole.png/..", "--out"), ("text.png --out x.png", "text.png")]}

@pytest.mark.parametrize("command, names", [(begin + go, says) for begin in BAD for go, says in BAD[begin]])
def test_bad_input_gets_one_sentence(workshop, monkeypatch, capsys, command, names):
    monkeypatch.chdir(workshop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vit, "train_epoch", lambda *args: pytest.fail("training began"))
    files = {path: path.stat().st_mtime_ns for path in workshop.rglob("*")}
    assert cli(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("vit.py: ") and error.count("\n") == 1 and names in error
    assert {path: path.stat().st_mtime_ns for path in workshop.rglob("*")} == files

def test_help_variants_and_warnings(monkeypatch, capsys):
    """What is typed wins over a variant; tokens that are too few or too many draw a warning."""
    assert cli("--version") == 0 and vit.__version__ in capsys.readouterr().out and cli("train --help") == 0
    text, made = capsys.readouterr().out, []
    assert "\ntraining:\n" in text and "\nmodel:\n" in text
    assert "--num-heads" in text and "(default: 0.006)" in text and "--num-classes" not in text
    monkeypatch.setattr(vit, "train", interrupt)
    for size, patch, says in ((32, 16, "patches, not 4;"), (224, 4, "patches, not 3,136;"), (32, 4, "")):
        assert cli(f"{SHAPES} --image-size {size} --patch-size {patch}") == 130
        out = capsys.readouterr().out
        assert ("warning" in out) == bool(says) and says in out
    monkeypatch.setattr(vit, "prepare", lambda *args: made.extend(args) or interrupt())
    assert cli("train --variant S/16 --depth 3 --patch-size 8") == 130
    assert vit.ViTConfig(dim=384, depth=3, num_heads=6, patch_size=8) in made

# ---- The texts ------------------------------------------------------------------------------------
def test_what_the_texts_show_exists(capsys):
    """Commands, pictures, options; and lines and functions are short."""
    commands = re.findall(r"python vit\.py (\w.*?)(?=  |`| &&|$)", README + vit.__doc__, re.M)
    assert {command.split()[0] for command in commands} == {"train", "eval", "viz"} and len(commands) > 20
    for command in commands:
        vit.make_parser().parse_args(shlex.split(command))
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)|src=\"([^\"]+)\"", README):
        assert (HERE / (target[0] or target[1])).is_file(), target
    assert cli("train --help", "viz --help", "--help") == 0
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= set(re.findall("--[a-z-]+", capsys.readouterr().out))
    assert max(map(len, SOURCE.splitlines())) <= 100
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name

def test_the_library_example_of_the_readme_runs(trained):
    shutil.copy(trained, "vit.pt")
    Image.new("RGB", (50, 40), "teal").save("cat.png")
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], names)
    assert names["logits"].shape == (1, 10)
    assert names["rollout"].shape == names["relevance"].shape == (1, math.prod(names["model"].grid))

@pytest.fixture
def recipe(trained, monkeypatch, capsys):
    """Runs a program of the README, as printed, beside a small vit.pt."""
    monkeypatch.setattr(vit, "augment", vit.augment)        # distill.py replaces it: put it back
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 128)
    shutil.copy(trained, "vit.pt")
    programs = re.findall(r'```python\n("""(\w+\.py): .*?)```', README, re.S)

    def run(*argv):
        source = next(program for program, name in programs if name == argv[0])
        monkeypatch.setattr(sys, "argv", list(argv))
        try:
            exec(compile(source, argv[0], "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            assert not end.code
        return capsys.readouterr().out
    return run

def answers_alike(answer, most=1e-5):
    """Does `answer`, of uint8 images, give vit.py's own probabilities, whatever the batch?"""
    (_, model, mean, std), images = vit.restore_model("vit.pt"), vit.make_shapes(7, 16, seed=5)[0]
    wanted = vit.predict(model, images, mean, std, torch.float32, 7).softmax(dim=1)
    for B in (1, 2, 7):
        assert_close(answer(images[:B]), wanted[:B], rtol=0, atol=most)

def test_an_exported_model_needs_no_vit_py(recipe, monkeypatch):
    recipe("export.py", "vit.pt")
    answers_alike(torch.export.load("vit.pt2").module())
    Image.new("RGB", (50, 40), "teal").save("cat.png")
    monkeypatch.setitem(sys.modules, "vit", None)           # to import it would raise ImportError
    assert re.fullmatch(r"cat.png: \w+ (disc|ring), [\d.]+%\n", recipe("classify.py", "cat.png"))

@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_answers_alike_and_int8_nearly(recipe):
    runtime = pytest.importorskip("onnxruntime")
    recipe("export.py", "vit.pt")
    assert recipe("to_onnx.py", "shapes").count("images/s") == 3
    for name, most in (("vit.onnx", 1e-5), ("vit.int8.onnx", 0.05)):
        model = runtime.InferenceSession(name)
        answers_alike(lambda x: torch.from_numpy(model.run(None, {"images": x.numpy()})[0]), most)

def test_pretraining_without_labels_and_a_teacher(recipe):
    losses = [float(line.split()[-1]) for line in recipe("mae.py", "shapes", "3").splitlines()]
    assert losses[2] < losses[0]
    options, config, start = vit.read_options(dict(data="shapes", init="mae.pt", batch_size=16))
    run, *_ = vit.prepare(config, options, start)
    assert torch.equal(run.model.blocks[5].mlp.fc1.weight, torch.load("mae.pt")["model"]["blocks.5.mlp.fc1.weight"])
    assert "wrote student.pt" in recipe("distill.py", "vit.pt", *SHAPES.split(), "--epochs=1", "--out=student.pt")
