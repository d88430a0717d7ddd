"""The proof that vit.py does what it says: python -m pytest

Each test holds it against something that knows the answer independently: torchvision's own Vision
Transformer, PyTorch's attention, numbers worked out by hand, or a property that must hold whatever
the weights are. All run offline and need no GPU.
"""

import ast
import csv
import math
import os
import pickle
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.models.vision_transformer import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

import vit

HERE = Path(__file__).parent
SMALL = dict(image_size=16, patch_size=4, dim=32, depth=2, num_heads=2)
TINY_RUN = "--image-size 16 --dim 32 --depth 2 --num-heads 2 --batch-size 16 --device cpu".split()
TINY_TRAIN = " ".join(["train --data shapes", *TINY_RUN])


def random_model(seed=0, **options):
    """A model in eval mode with every parameter random, so that no zero or one hides an error."""
    model = vit.ViT(vit.ViTConfig(**(SMALL | options)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def few_shapes(monkeypatch, tmp_path):
    """A short version of the built-in data, in an empty folder that is also the working one."""
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 64)
    monkeypatch.setitem(vit.SHAPE_COUNTS, "test", 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The checkpoint of a small model after an epoch of a few shapes."""
    out = tmp_path_factory.mktemp("trained") / "vit.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vit.SHAPE_COUNTS, "train", 32)
        patch.setitem(vit.SHAPE_COUNTS, "test", 10)
        assert vit.main(["train", "--data", "shapes", "--epochs", "1", "--out", str(out), *TINY_RUN]) == 0
    return out


def size_of(path):
    with Image.open(path) as image:
        return image.size


def make_folder(root, size=(20, 16), classes=("cat", "dog"), splits=("train", "test"), count=8):
    """A folder of noise images: root/SPLIT/CLASS/0.png ..."""
    rng = np.random.default_rng(0)
    for split in splits:
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


# ---- The model ------------------------------------------------------------------------------------


def test_shapes_at_every_stage():
    model, images = random_model(), random_images(3, 3, 16, 16)
    tokens = model.patch_embed(images)
    assert tokens.shape == (3, 16, 32)
    x, weights = model.blocks[0].attn(torch.cat([tokens, tokens[:, :1]], dim=1))
    assert x.shape == (3, 17, 32) and weights.shape == (3, 2, 17, 17)
    assert model.blocks[0].mlp(tokens).shape == tokens.shape
    logits, attention = model(images, return_attention=True)
    assert logits.shape == (3, 10)
    assert [A.shape for A in attention] == [(3, 2, 17, 17)] * 2
    assert torch.equal(model(images), logits)


def test_parameter_names_are_the_fields():
    names = {name for name, _ in random_model(depth=1).named_parameters()}
    layers = ["patch_embed.proj", "blocks.0.norm1", "blocks.0.attn.qkv", "blocks.0.attn.proj",
              "blocks.0.norm2", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "norm", "head"]
    assert names == {"cls_token", "pos_embed"} | {
        f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


@pytest.mark.parametrize("name, count", [
    ("Ti/16", 5_717_416), ("S/16", 22_050_664), ("B/16", 86_567_656), ("L/16", 304_326_632)])
def test_parameter_counts(name, count):
    """The counts that torchvision, DeiT and the paper's code have, and that the table prints."""
    dim, depth, heads = vit.VARIANTS[name]
    with torch.device("meta"):
        model = vit.ViT(vit.ViTConfig(image_size=224, patch_size=16, num_classes=1000, dim=dim,
                                      depth=depth, num_heads=heads))
    assert sum(p.numel() for p in model.parameters()) == count
    row = re.search(rf'"{name}":.*', (HERE / "vit.py").read_text()).group()
    assert f"{count:,}" in row


def test_default_size():
    model = vit.ViT(vit.ViTConfig())
    count = sum(p.numel() for p in model.parameters())
    assert count == 2_693_578 and f"{count:,}" in (HERE / "vit.py").read_text()
    assert vit.VARIANTS["cifar"] == (model.config.dim, model.config.depth, model.config.num_heads)


@pytest.mark.parametrize("size, patch, dim, depth, heads, ratio", [
    (32, 4, 192, 6, 3, 4.0), (16, 4, 32, 1, 1, 2.0), (48, 8, 48, 3, 4, 4.0), (224, 16, 64, 2, 8, 3.0)])
def test_logits_equal_torchvision(size, patch, dim, depth, heads, ratio):
    ours = random_model(image_size=size, patch_size=patch, dim=dim, depth=depth, num_heads=heads,
                        mlp_ratio=ratio, num_classes=7)
    theirs = VisionTransformer(image_size=size, patch_size=patch, num_layers=depth, num_heads=heads,
                               hidden_dim=dim, mlp_dim=int(dim * ratio), num_classes=7).eval()
    rename = {"patch_embed.proj": "conv_proj", "cls_token": "class_token", "norm1": "ln_1",
              "pos_embed": "encoder.pos_embedding", "attn.qkv.": "self_attention.in_proj_",
              "attn.proj": "self_attention.out_proj", "norm2": "ln_2", "mlp.fc1": "mlp.0",
              "mlp.fc2": "mlp.3", "blocks.": "encoder.layers.encoder_layer_"}
    state = {}
    for name, value in ours.state_dict().items():
        for old, new in rename.items():
            name = name.replace(old, new)
        name = re.sub(r"^norm\.", "encoder.ln.", re.sub(r"^head\.", "heads.head.", name))
        state[name] = value
    theirs.load_state_dict(state)
    images = random_images(2, 3, size, size)
    with torch.no_grad():
        a, b = ours(images), theirs(images)
    assert b.std() > 0.1                    # random enough to tell
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_equals_pytorch(heads):
    attn = random_model(num_heads=heads).blocks[0].attn
    x = random_images(3, 9, 32)
    ours, weights = attn(x)
    theirs, their_weights = F.multi_head_attention_forward(
        *[x.transpose(0, 1)] * 3, 32, heads, attn.qkv.weight, attn.qkv.bias, None, None, False, 0.0,
        attn.proj.weight, attn.proj.bias, training=False, average_attn_weights=False)
    torch.testing.assert_close(ours, theirs.transpose(0, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, their_weights, atol=1e-6, rtol=1e-5)


def test_fused_attention_is_the_same_with_its_gradients():
    attn = random_model().blocks[0].attn
    results = []
    for fused in (False, True):
        x = random_images(2, 9, 32).requires_grad_()
        out, weights = attn(x, fused=fused)
        assert (weights is None) == fused
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *attn.parameters()])))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_worked_example_of_section_3():
    """q, k and v as in the text, planted in the weights: token i is one-hot, so column i is its row."""
    attn = vit.Attention(vit.ViTConfig(dim=4, num_heads=1, patch_size=4))
    q, k, v = torch.ones(4, 4), torch.zeros(4, 4), torch.eye(4)
    k[0, 1] = k[0, 2] = k[1, 2] = 2
    with torch.no_grad():
        attn.qkv.weight.copy_(torch.cat([q, k, v]))
        attn.qkv.bias.zero_()
        attn.proj.weight.copy_(torch.eye(4))
        attn.proj.bias.zero_()
    out, weights = attn(torch.eye(4)[None, :3])
    expected = torch.tensor([0.090, 0.245, 0.665])
    torch.testing.assert_close(weights[0, 0, 0], expected, atol=5e-4, rtol=0)
    torch.testing.assert_close(out[0, 0], F.pad(expected, (0, 1)), atol=5e-4, rtol=0)
    unscaled = torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    torch.testing.assert_close(unscaled, torch.tensor([0.016, 0.117, 0.867]), atol=5e-4, rtol=0)


def test_returned_attention_multiplied_v():
    """Rows sum to 1; and the weights reproduce the layer's output and belong to its graph."""
    model = random_model()
    logits, attention = model(random_images(2, 3, 16, 16), return_attention=True)
    for A in attention:
        assert (A >= 0).all()
        torch.testing.assert_close(A.sum(-1), torch.ones(A.shape[:-1]))
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(logits.sum(), attention))
    attn, x = model.blocks[0].attn, random_images(2, 5, 32)
    out, A = attn(x)
    v = attn.qkv(x)[:, :, 64:].reshape(2, 5, 2, 16).transpose(1, 2)
    torch.testing.assert_close(out, attn.proj((A @ v).transpose(1, 2).reshape(2, 5, 32)))


def test_patch_embedding_is_cut_and_multiply():
    model, images = random_model(), random_images(2, 3, 16, 16)
    proj = model.patch_embed.proj
    E = proj.weight.reshape(32, -1)
    unfolded = F.unfold(images, kernel_size=4, stride=4).transpose(1, 2) @ E.T + proj.bias
    torch.testing.assert_close(model.patch_embed(images), unfolded, atol=1e-5, rtol=1e-5)
    patch = images[1, :, 4:8, 8:12].reshape(-1)         # second row, third column: token 1 * 4 + 2
    torch.testing.assert_close(model.patch_embed(images)[1, 6], E @ patch + proj.bias, atol=1e-5,
                               rtol=1e-5)


def test_images_of_a_batch_do_not_mix():
    model, images = random_model().train(), random_images(4, 3, 16, 16)
    before = model(images)
    images[2] += 1
    after = model(images)
    keep = [0, 1, 3]
    torch.testing.assert_close(after[keep], before[keep])
    assert not torch.allclose(after[2], before[2], atol=1e-3)


def test_positions_are_what_tells_places_apart():
    model, images = random_model(), random_images(2, 3, 16, 16)
    patches = F.unfold(images, 4, stride=4)[:, :, torch.randperm(16)]
    shuffled = F.fold(patches, (16, 16), 4, stride=4)
    assert not torch.allclose(model(images), model(shuffled), atol=1e-3)
    with torch.no_grad():
        model.pos_embed.zero_()
    torch.testing.assert_close(model(images), model(shuffled), atol=1e-5, rtol=1e-5)


def test_gradient_reaches_every_parameter():
    model = random_model().train()
    F.cross_entropy(model(random_images(4, 3, 16, 16)), torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_sine_positions():
    table = vit.sincos_positions(3, 5, 8)
    assert table.shape == (15, 8)
    row, col = 2, 3                                     # frequencies 1 and 1/10
    waves = [math.sin(2), math.sin(0.2), math.cos(2), math.cos(0.2),
             math.sin(3), math.sin(0.3), math.cos(3), math.cos(0.3)]
    torch.testing.assert_close(table[row * 5 + col], torch.tensor(waves))
    assert vit.sincos_positions(2, 2, 7).shape == (4, 7)


def test_positions_for_another_grid():
    model = random_model()
    assert model.positions(4, 4) is model.pos_embed
    with torch.no_grad():                               # a plane: the row number in every channel
        model.pos_embed[0, 1:] = torch.arange(4.0).repeat_interleave(4)[:, None]
    longer = model.positions(8, 2)
    assert longer.shape == (1, 17, 32)
    assert torch.equal(longer[:, 0], model.pos_embed[:, 0])
    rows = longer[0, 1:].reshape(8, 2, 32)
    torch.testing.assert_close(rows[:, 0], rows[:, 1])
    assert (rows[1:, 0, 0] > rows[:-1, 0, 0]).all()     # rows still go up: not swapped with columns
    assert model(random_images(1, 3, 32, 8)).shape == (1, 10)
    with pytest.raises(ValueError, match="17 x 16"):
        model(random_images(1, 3, 17, 16))


def test_initialisation():
    torch.manual_seed(0)
    model = vit.ViT(vit.ViTConfig())
    block, x = model.blocks[0], torch.randn(2, 65, 192)
    assert abs(model.patch_embed(torch.randn(2, 3, 32, 32)).std() - 1) < 0.1
    assert abs(block.mlp.fc1(x).std() - 1) < 0.1
    q, k, v = block.attn.qkv(x).reshape(2, 65, 3, 3, 64).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(2, 3) / 8
    assert all(abs(part.std() - 1) < 0.1 for part in (q, k, v, scores))     # as section 3 supposes
    assert torch.equal(block(x)[0], x)                          # a block starts as the identity
    loss = F.cross_entropy(model(torch.randn(64, 3, 32, 32)), torch.arange(64) % 10)
    assert abs(loss - math.log(10)) < 0.1


def test_drop_path():
    torch.manual_seed(0)
    layer, x = vit.DropPath(0.25), torch.ones(4000, 2, 3)
    assert torch.equal(layer.eval()(x), x)
    out = layer.train()(x)
    assert all(len(image.unique()) == 1 for image in out)       # a branch is dropped whole
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert abs(out.mean() - 1) < 0.05
    rates = [block.drop_path.rate for block in vit.ViT(vit.ViTConfig(drop_path=0.3, depth=4)).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_cost_of_the_text():
    text = (HERE / "vit.py").read_text()
    for side, patch, name in ((32, 4, "cifar"), (224, 16, "B/16")):
        dim, depth, heads = vit.VARIANTS[name]
        N = (side // patch) ** 2 + 1
        linear, pairs = 12 * N * dim**2, 2 * N**2 * dim
        numbers = [f"{number / 1e6:.1f} M" for number in (linear, pairs, linear + pairs)]
        total = f"{depth * (linear + pairs) / 1e9:.{2 if depth < 10 else 1}f} G"
        row = rf"{side}/{patch} +{N} +{dim} +" + " +".join(map(re.escape, [*numbers, total]))
        assert re.search(row, text), row


@pytest.mark.parametrize("name", ["cifar", "B/16"])
def test_cost_formula_counts_what_runs(name):
    """12ND^2 + 2N^2D against PyTorch's own count of one block (two operations a multiply-add)."""
    dim, _, heads = vit.VARIANTS[name]
    with torch.device("meta"):
        block = vit.Block(vit.ViTConfig(dim=dim, num_heads=heads), drop_path=0)
        x = torch.empty(1, 65, dim)
    with FlopCounterMode(display=False) as counter:
        block(x)
    assert counter.get_total_flops() == 2 * (12 * 65 * dim**2 + 2 * 65**2 * dim)


# ---- Data -----------------------------------------------------------------------------------------


def test_shapes():
    images, labels, masks = vit.make_shapes(200, 32, seed=3)
    assert images.dtype == torch.uint8 and images.shape == (200, 3, 32, 32)
    assert masks.dtype == torch.bool and masks.shape == (200, 32, 32)
    assert labels.bincount(minlength=10).tolist() == [20] * 10
    again = vit.make_shapes(200, 32, seed=3)
    assert all(torch.equal(a, b) for a, b in zip((images, labels, masks), again))
    assert not torch.equal(images, vit.make_shapes(200, 32, seed=4)[0])
    colours = torch.tensor(list(vit.COLOURS.values())).float()
    spread = images.float().amax(1) - images.float().amin(1)    # colour: far from grey
    for image, label, mask, s in zip(images.float(), labels, masks, spread):
        assert mask.any()
        distance = (colours - image[:, mask].mean(1)).square().sum(1)
        assert distance.argmin() == label // 2
        assert s[mask].mean() > 100 and s[~mask].mean() < 40
        rows, cols = mask.nonzero().T
        middle = mask[(rows.min() + rows.max()) // 2, (cols.min() + cols.max()) // 2]
        assert middle == (label % 2 == 0)                       # a disc is full, a ring is not


def test_augment_is_a_shift_and_a_flip():
    torch.manual_seed(0)
    images, seen = random_images(32, 3, 8, 8), set()
    out, padded = vit.shift_and_flip(images, 2), F.pad(images, (2, 2, 2, 2))
    for i in range(32):
        for y, x, flip in ((y, x, flip) for y in range(5) for x in range(5) for flip in (0, 1)):
            window = padded[i, :, y:y + 8, x:x + 8]
            if torch.equal(out[i], window.flip(-1) if flip else window):
                seen.add((i, y, x, flip))
    assert len(seen) == 32                                      # each image is exactly one of them
    assert {s[1] for s in seen} == {s[2] for s in seen} == set(range(5))
    assert {s[3] for s in seen} == {0, 1}


def noise_data(classes=4, alter=True):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)
    return vit.Data(images, torch.arange(64) % classes, images, torch.arange(64) % classes,
                    list("abcdefgh"[:classes]), torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25),
                    alter)


def test_policy_changes_pixels_and_leaves_labels():
    data = noise_data(alter=False)
    images, labels = vit.augment(data.images, data.labels, data, policy=1.0)
    assert torch.equal(labels, data.labels)
    plain = vit.normalise(data.images, data.mean, data.std)
    changed = [not torch.equal(x, p) and not torch.equal(x, p.flip(-1)) for x, p in zip(images, plain)]
    assert 0.5 < sum(changed) / 64 <= 1
    slices = torch.tensor(changed).reshape(8, 8).float().mean(1)
    assert slices.unique().numel() > 1 or slices[0] == 1        # an operation for each slice


def test_mixed_labels_say_how_much_of_whom():
    """Images that are the number of their class everywhere: then the mean of a mixed image must be
    the mean under its label, whichever way it was mixed."""
    data = noise_data(alter=False)
    data.images = (60 * data.labels[:, None, None, None]).expand(-1, 3, 16, 16).to(torch.uint8)
    for _ in range(8):
        images, labels = vit.augment(data.images, data.labels, data, mix=1.0)
        assert labels.shape == (64, 4)
        torch.testing.assert_close(labels.sum(1), torch.ones(64))
        seen = (images.mean(dim=(1, 2, 3)) * 0.25 + 0.5) * 255
        torch.testing.assert_close(seen, 60 * (labels @ torch.arange(4.0)), atol=1e-2, rtol=1e-4)


def test_strength_grows_with_the_run():
    assert [vit.strong_share(epochs) for epochs in (1, 10, 40, 70, 300)] == [0, 0, 0.5, 1, 1]


def test_strong_alterations_are_used_and_mixing_ends_before_the_run_does(monkeypatch):
    seen, batches, real = [], [], vit.augment

    def spy(images, labels, data, policy, mix):
        seen.append((policy, mix))
        batches.append(labels)
        return real(images, labels, data, policy, mix)

    monkeypatch.setattr(vit, "augment", spy)
    config = vit.TrainConfig(epochs=100, batch_size=32)
    model = vit.ViT(vit.ViTConfig(**(SMALL | {"num_classes": 4})))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = vit.Run(model.config, model, vit.make_optimizers(model, config), scaler, [])
    for done in (0, 89, 90, 99):
        run.history = [None] * done
        loss, accuracy, _ = vit.train_epoch(run, noise_data(), config, torch.float32)
        assert math.isfinite(loss) and 0 <= accuracy <= 1
        rate = vit.learning_rate(2 * done + 1, 200, 20, config.lr)          # two steps an epoch
        assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    assert not torch.equal(batches[0], batches[2])                          # another order
    assert seen[::2] == [(1, 1), (1, 1), (1, 0), (1, 0)]
    run.history = []
    vit.train_epoch(run, noise_data(alter=False), config, torch.float32)
    assert seen[-1] == (0, 0)


def test_cifar10_as_torchvision_reads_it(monkeypatch, tmp_path):
    """torchvision's class on batch files of the original's layout; only its checksums are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: path.is_file()
                        if isinstance(path, Path) else Path(path).is_file())
    folder, rng = tmp_path / "data" / CIFAR10.base_folder, np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        batch = {"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(batch))
    names = [f"class {i}" for i in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    config = vit.TrainConfig(batch_size=16)
    data = vit.load_data(config, 32, torch.device("cpu"))
    assert data.images.shape == (50, 3, 32, 32) and data.test_images.shape == (10, 3, 32, 32)
    assert data.classes == names and data.labels.tolist() == list(range(10)) * 5 and data.alter
    assert torch.equal(data.test_images.reshape(10, -1), torch.from_numpy(batch["data"]))
    exact = data.images.double().div(255)
    torch.testing.assert_close(data.mean.flatten().double(), exact.mean((0, 2, 3)), atol=1e-5, rtol=0)


def test_names_of_every_kind_work(tmp_path, monkeypatch, capsys):
    """Spaces, letters of other scripts and signs, in folders, classes and files."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("mes données"), classes=("café noir", "猫 $x_1$"))
    options = [*TINY_RUN, "--batch-size", "8", "--out", "modèle 1.pt"]
    assert vit.main(["train", "--data", "mes données", "--epochs", "1", *options]) == 0
    Image.new("RGB", (40, 40)).save("Käfer 猫.png")
    command = ["viz", "--ckpt", "modèle 1.pt", "--target", "猫 $x_1$", "--image", "Käfer 猫.png", "test:1"]
    assert vit.main(command) == 0 and vit.main(["eval", "--ckpt", "modèle 1.pt"]) == 0
    assert size_of("Käfer 猫_attention.png") == (1600, 900) and not capsys.readouterr().err


def test_folder_of_images(tmp_path):
    make_folder(tmp_path / "my pictures ü", splits=("train", "val"))
    data = vit.load_data(vit.TrainConfig(data=str(tmp_path / "my pictures ü"), batch_size=4), 16,
                         torch.device("cpu"))
    assert data.classes == ["cat", "dog"] and data.images.shape == (16, 3, 16, 16)
    with Image.open(tmp_path / "my pictures ü/train/cat/0.png") as image:
        first = np.asarray(image)
    assert (data.images[0].permute(1, 2, 0).numpy() == first[:, 2:18]).all()    # the middle, unscaled


def test_images_from_the_world(tmp_path):
    def read(image, name, **options):
        image.save(tmp_path / name, **options)
        return vit.open_image(tmp_path / name, background=(10, 20, 30))

    half = Image.new("RGB", (40, 20), "white")
    half.paste((0, 0, 0), (0, 0, 20, 20))               # left half black
    exif = Image.Exif()
    exif[0x0112] = 6                                    # "turn a quarter clockwise to see it upright"
    turned = read(half, "turned.jpg", exif=exif)
    assert turned.size == (20, 40) and turned.getpixel((10, 5))[0] < 20 < 235 < turned.getpixel((10, 35))[0]
    assert read(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "clear.png").getpixel((0, 0)) == (10, 20, 30)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    assert read(palette, "palette.png", transparency=0).getpixel((0, 0)) == (10, 20, 30)
    ramp = Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16))
    assert len(read(ramp, "deep.png").getcolors()) > 250
    assert read(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "print.jpg").getpixel((0, 0))[0] > 200
    assert read(Image.new("L", (1, 1), 7), "dot.png").getpixel((0, 0)) == (7, 7, 7)


def test_extreme_sizes_are_drawn(trained, tmp_path, capsys):
    for size in ((1, 1), (32, 4000), (8000, 6000)):
        out = tmp_path / f"{size[0]}.png"
        Image.new("RGB", size, "teal").save(tmp_path / "image.jpg")
        assert vit.main(["viz", "--ckpt", str(trained), "--image", str(tmp_path / "image.jpg"),
                         "--out", str(out)]) == 0
        assert size_of(out) == (1600, 900) and ("enlarged" in capsys.readouterr().err) == (size[0] == 1)


def test_more_pixels_than_pillow_allows(monkeypatch, tmp_path):
    Image.new("L", (100, 100)).save(tmp_path / "large.png")
    for limit in (9_000, 4_000):                                # a warning of Pillow's, and an error
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(vit.InputError, match="large.png.*10000 pixels"):
            vit.open_image(tmp_path / "large.png")


def test_animation_gives_its_first_frame(tmp_path, capsys):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert vit.open_image(tmp_path / "a.gif").getpixel((0, 0)) == (255, 0, 0)
    assert "2 pictures" in capsys.readouterr().err


def test_fit_keeps_the_middle():
    image = Image.new("RGB", (400, 40), "black")
    image.paste((255, 255, 255), (180, 0, 220, 40))
    assert vit.square_of(image) == (180, 0, 220, 40)
    assert vit.fit(image, 16).getcolors() == [(256, (255, 255, 255))]
    assert vit.fit(Image.new("RGB", (1, 1)), 32).size == (32, 32)


# ---- Optimisation ---------------------------------------------------------------------------------


def test_learning_rate_at_its_corners():
    rate = [vit.learning_rate(step, 100, 10, peak=2.0, final=0.5) for step in range(101)]
    assert rate[0] == pytest.approx(2 / 11) and rate[10] == 2.0 == max(rate)
    assert rate[55] == pytest.approx((2 + 0.5) / 2) and rate[100] == pytest.approx(0.5)
    assert all(a < b for a, b in zip(rate[:10], rate[1:11]))
    assert all(a > b for a, b in zip(rate[10:], rate[11:]))
    assert vit.learning_rate(0, 5, 0, peak=1.0) == 1.0


def test_parameter_groups():
    model = random_model()
    groups, names = vit.parameter_groups(model), dict(model.named_parameters())
    ids = [id(p) for group in groups for p in group]
    assert sorted(ids) == sorted(map(id, names.values()))       # each parameter once
    where = {id(p): kind for kind, group in zip(("matrices", "decay", "rest"), groups) for p in group}
    expected = {"patch_embed.proj.weight": "decay", "head.weight": "decay", "cls_token": "rest",
                "pos_embed": "rest", "norm.weight": "rest", "blocks.1.norm2.weight": "rest",
                "blocks.0.attn.qkv.weight": "matrices", "blocks.0.attn.qkv.bias": "rest",
                "blocks.1.attn.proj.weight": "matrices", "blocks.1.mlp.fc1.weight": "matrices",
                "blocks.0.mlp.fc2.weight": "matrices", "head.bias": "rest"}
    assert {name: where[id(names[name])] for name in expected} == expected


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizers_hold_every_parameter_and_decay_the_right_ones(optimizer):
    model = random_model()
    optimizers = vit.make_optimizers(model, vit.TrainConfig(optimizer=optimizer, weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for o in optimizers for group in o.param_groups
             for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        matrix = name.endswith(("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight"))
        assert decay[id(parameter)] == (0.3 if matrix else 0.0), name


def test_muon_makes_all_directions_equally_strong():
    """The gradient of a matrix has strong and weak directions; a first step of Muon, hardly so."""
    model = random_model()
    weight = model.blocks[0].attn.proj.weight
    before = weight.detach().clone()
    muon = vit.make_optimizers(model, vit.TrainConfig(weight_decay=0.0, muon_lr=0.1))[1]
    muon.param_groups[0]["lr"] = 0.1
    model(random_images(8, 3, 16, 16)).square().sum().backward()
    steep = torch.linalg.svdvals(weight.grad)
    muon.step()
    change = torch.linalg.svdvals(weight - before) / 0.1
    assert steep[0] / steep[15] > 10 and change[0] / change[15] < 2 and 0.5 < change[15] < 1.5


def small_step(scaler, clip, poison=False):
    """One `update` by two SGDs of rate 1; returns the parameters before and after, and the norm."""
    torch.manual_seed(0)
    model = random_model()
    halves = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizers = [torch.optim.SGD(half, lr=1.0) for half in halves]
    before = [p.detach().clone() for p in model.parameters()]
    loss = 100 * model(random_images(4, 3, 16, 16)).square().mean()
    if poison:
        halves[0][0].register_hook(lambda grad: grad * torch.nan)
    norm = vit.update(loss, model, optimizers, scaler, clip)
    return before, [p.detach() for p in model.parameters()], norm


@pytest.mark.parametrize("scale", [None, 2.0**16])
def test_clipping_acts_on_unscaled_gradients(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    before, after, norm = small_step(scaler, clip=0.5)
    length = torch.stack([(a - b).norm() for a, b in zip(after, before)]).norm()
    assert norm > 1 and length == pytest.approx(0.5, rel=1e-3)
    before, after, same_norm = small_step(scaler, clip=1e6)
    length = torch.stack([(a - b).norm() for a, b in zip(after, before)]).norm()
    assert same_norm == pytest.approx(norm.item(), rel=1e-3) == pytest.approx(length.item(), rel=1e-2)


def test_a_nan_in_one_group_changes_no_parameter():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before, after, norm = small_step(scaler, clip=1.0, poison=True)
    assert norm.isnan() and all(torch.equal(a, b) for a, b in zip(after, before))
    assert scaler.get_scale() == 512.0                          # and the scaler has noticed


def test_precision_and_device(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for flags, dtype in (({"amx_bf16": True}, torch.bfloat16), ({"avx512_bf16": True}, torch.bfloat16),
                         ({"amx_bf16": False, "avx2": True}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags)
        assert vit.pick_precision("auto", cpu) == dtype
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert vit.pick_precision("auto", cuda) == dtype
    assert vit.pick_precision("auto", torch.device("mps")) == torch.float32
    assert vit.pick_precision("fp16", cpu) == torch.float16
    for cuda_there, mps_there, name in ((1, 1, "cuda"), (0, 1, "mps"), (0, 0, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda_there))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps_there))
        assert vit.pick_device("auto").type == name


# ---- Training -------------------------------------------------------------------------------------


def test_one_batch_is_learned_by_heart():
    torch.manual_seed(0)
    images, labels, _ = vit.make_shapes(20, 16, seed=0)
    x = vit.normalise(images, 0.5, 0.25)
    config = vit.TrainConfig(lr=3e-3)
    model = vit.ViT(vit.ViTConfig(**SMALL))
    optimizers = vit.make_optimizers(model, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(60):
        vit.update(F.cross_entropy(model(x), labels), model, optimizers, scaler, clip=1.0)
    assert (model(x).argmax(1) == labels).all()


@pytest.mark.parametrize("amp", ["fp16", "bf16", "off"])
def test_every_precision_trains(few_shapes, amp, monkeypatch):
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 160)
    command = ["train", "--data", "shapes", "--epochs", "4", "--amp", amp, *TINY_RUN]
    assert vit.main(command) == 0
    checkpoint = vit.load_checkpoint("vit.pt")
    losses = [row["train_loss"] for row in checkpoint["history"]]
    assert losses[-1] < losses[0] - 0.3
    assert bool(checkpoint["scaler"]) == (amp == "fp16")


def test_train_resume_viz(few_shapes, capsys):
    """The whole way through the command line; and 1 + 1 epochs are bit for bit the same as 2."""
    common = ["train", "--data", "shapes", "--dropout", "0.1", "--drop-path", "0.1", *TINY_RUN]
    assert vit.main([*common, "--epochs", "2", "--out", "whole.pt"]) == 0
    out = capsys.readouterr().out
    assert "64 training and 20 test images" in out and "test accuracy" in out.splitlines()[-3]

    class Stop(Exception):
        pass

    def stop_after_first(run, config, data):
        save(run, config, data)
        raise Stop

    save = vit.save_run
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(vit, "save_run", stop_after_first)
        vit.main([*common, "--epochs", "2", "--out", "cut.pt"])
    assert vit.main(["train", "--resume", "cut.pt"]) == 0
    whole, cut = vit.load_checkpoint("whole.pt"), vit.load_checkpoint("cut.pt")
    assert whole["epoch"] == cut["epoch"] == 2
    assert all(torch.equal(whole["model"][name], cut["model"][name]) for name in whole["model"])
    for a, b in zip(whole["history"], cut["history"]):
        assert {k: v for k, v in a.items() if "second" not in k} == {
            k: v for k, v in b.items() if "second" not in k}
    rows = list(csv.DictReader(Path("cut.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[1]["test_accuracy"]) == cut["history"][1]["test_accuracy"]
    assert size_of("cut.png")[0] > 500

    capsys.readouterr()
    assert vit.main(["viz", "--ckpt", "cut.pt", "--image", "test:7"]) == 0
    assert capsys.readouterr().out == "wrote test_7_attention.png\n"
    first = Path("test_7_attention.png").read_bytes()
    assert vit.main(["viz", "--ckpt", "cut.pt", "--image", "test:7", "--out", "again.png"]) == 0
    assert Path("again.png").read_bytes() == first              # same input, same bytes
    Image.new("RGB", (300, 200), "red").save("my cat.jpg")
    Image.new("L", (5, 9)).save("dot.png")
    assert vit.main(["viz", "--ckpt", "cut.pt", "--image", "my cat.jpg", "dot.png"]) == 0
    assert Path("my cat_attention.png").exists() and "dot.png is enlarged" in capsys.readouterr().err
    assert not list(few_shapes.glob("*.tmp"))


def test_a_cnn_in_the_same_loop(few_shapes, capsys):
    """torchvision's ResNet-18 but for its stem: trained, tested, and not to be drawn."""
    model = vit.make_model("resnet18", vit.ViTConfig(num_classes=7))
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7) and model.layer1(
        model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32)))).shape[2:] == (32, 32)
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 993 * 513 - 64 * 3 * (49 - 9)
    assert vit.main(["train", "--data", "shapes", "--epochs", "1", "--model", "resnet18", *TINY_RUN]) == 0
    assert "in batches of 16, AdamW, seed" in capsys.readouterr().out
    assert vit.main(["eval", "--ckpt", "vit.pt"]) == 0
    assert vit.main(["viz", "--ckpt", "vit.pt", "--image", "test:0"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler")
def test_compiled_it_learns_the_same(few_shapes):
    """And its checkpoint is plain."""
    losses = []
    for extra in ([], ["--compile"]):
        assert vit.main(["train", "--data", "shapes", "--epochs", "1", "--amp", "off", *TINY_RUN, *extra]) == 0
        checkpoint = vit.load_checkpoint("vit.pt")
        losses.append(checkpoint["history"][0]["test_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert vit.main(["viz", "--ckpt", "vit.pt", "--image", "test:0"]) == 0


def test_viz_target_and_what_it_learnt(few_shapes, trained, capsys):
    command = ["viz", "--ckpt", str(trained)]
    assert vit.main([*command, "--image", "test:1", "--target", "blue ring", "--out", "blue.png"]) == 0
    assert vit.main([*command, "--image", "test:1", "--target", "red disc", "--out", "red.png"]) == 0
    assert Path("blue.png").read_bytes() != Path("red.png").read_bytes()
    assert vit.main(command) == 0 and size_of("learnt.png") == (1600, 540)


def test_eval_counts(few_shapes, trained, monkeypatch, capsys):
    """Accuracy by class and mistakes, against a count by hand; the same figure as the log's."""
    monkeypatch.setitem(vit.SHAPE_COUNTS, "test", 10)
    monkeypatch.setattr(vit, "pick_device", lambda name: torch.device("cpu"))
    assert vit.main(["eval", "--ckpt", str(trained)]) == 0
    out = capsys.readouterr().out
    assert f"test accuracy {vit.load_checkpoint(trained)['history'][-1]['test_accuracy']:.2%}" in out
    monkeypatch.setitem(vit.SHAPE_COUNTS, "test", 20)
    guesses = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 2, 3, 5, 5, 6, 1, 8, 1])
    monkeypatch.setattr(vit, "predict", lambda *args: F.one_hot(guesses, 10).float())
    assert vit.main(["eval", "--ckpt", str(trained)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "test accuracy 80.00% on 20 images of shapes" in lines
    assert "   50.0%  red ring" in lines and "  100.0%  red disc" in lines
    assert "       1  red ring taken for red disc" in lines


def test_a_seed_fixes_the_run(few_shapes):
    weights = []
    for seed in ("3", "3", "4"):
        vit.main(["train", "--data", "shapes", "--epochs", "1", "--seed", seed, *TINY_RUN])
        weights.append(vit.load_checkpoint("vit.pt")["model"]["blocks.0.mlp.fc1.weight"])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_new_run_keeps_the_old_checkpoint(few_shapes, capsys):
    command = ["train", "--data", "shapes", "--epochs", "1", *TINY_RUN]
    assert vit.main(command) == 0
    before = Path("vit.pt").read_bytes()
    assert vit.main(command) == 0
    assert Path("vit.old.pt").read_bytes() == before and "vit.old.pt" in capsys.readouterr().out
    newer = Path("vit.pt").read_bytes()                         # not moved for a run that saves nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vit, "train_epoch", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert vit.main(command) == 130
    assert Path("vit.pt").read_bytes() == newer and Path("vit.old.pt").read_bytes() == before
    assert vit.main(command) == 0                               # and a third one keeps both
    assert Path("vit.old2.pt").read_bytes() == newer and Path("vit.old.pt").read_bytes() == before
    assert Path("vit.old2.csv").exists() and Path("vit.old2.png").exists()


def test_evaluation_counts(monkeypatch):
    """Accuracy and loss of a model whose logits are known: they are the pixels."""
    logits = torch.tensor([[9, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0.0]])
    data = vit.Data(None, None, (logits[:, :, None, None] * 20).to(torch.uint8),
                    torch.tensor([0, 1, 1, 2, 2]), ["a", "b", "c"], torch.zeros(3, 1, 1),
                    torch.full((3, 1, 1), 20 / 255), False)
    loss, accuracy = vit.evaluate(torch.nn.Flatten(), data, torch.float32)
    assert accuracy == pytest.approx(0.6)
    assert loss == pytest.approx(F.cross_entropy(logits, data.test_labels).item(), rel=1e-4)


def test_a_loss_that_is_not_finite_stops_the_run(few_shapes, monkeypatch, capsys):
    """Before the checkpoint is written, with the step and a suggestion."""
    monkeypatch.setattr(vit.ViT, "initialise", lambda self: torch.nn.init.constant_(self.head.bias, torch.nan))
    assert vit.main(["train", "--data", "shapes", "--epochs", "1", "--amp", "off", *TINY_RUN]) == 2
    error = capsys.readouterr().err
    assert re.search("loss is nan at step [0-3];", error) and "--lr" in error
    assert not Path("vit.pt").exists()


def test_ctrl_c_leaves_the_last_checkpoint(few_shapes, monkeypatch, capsys):
    epochs, real = [], vit.train_epoch

    def interrupted(*args):
        epochs.append(1)
        if len(epochs) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(vit, "train_epoch", interrupted)
    assert vit.main(["train", "--data", "shapes", "--epochs", "3", *TINY_RUN]) == 130
    assert "python vit.py train --resume vit.pt" in capsys.readouterr().out.splitlines()[-1]
    assert vit.load_checkpoint("vit.pt")["epoch"] == 1
    monkeypatch.setattr(vit, "train_epoch", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert vit.main(["train", "--resume", "vit.pt", "--out", "other.pt"]) == 130       # not saved yet
    assert "python vit.py train --resume vit.pt" in capsys.readouterr().out.splitlines()[-1]
    assert vit.main(["train", "--data", "shapes", "--out", "other.pt", *TINY_RUN]) == 130
    assert "nothing is saved yet" in capsys.readouterr().out.splitlines()[-1]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(vit.InputError, match="untouched"), vit.whole_file(path) as file:
        file.write_text("half")
        raise OSError("no space left")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_checkpoints_are_checked(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = trained.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for name, content, says in (("flipped.pt", flipped, "damaged"), ("cut.pt", whole[:-100], "not a whole"),
                                ("empty.pt", b"", "not a whole"), ("text.pt", b"hello", "not a whole")):
        Path(name).write_bytes(content)
        with pytest.raises(vit.InputError, match=says):
            vit.load_checkpoint(name)


def altered(path, to, **parts):
    """A copy of a checkpoint with other parts."""
    torch.save(torch.load(path, weights_only=True) | parts, to)
    return to


def test_weights_of_a_wrapped_model_are_accepted(trained, tmp_path):
    weights = torch.load(trained, weights_only=True)["model"]
    wrapped = {"module._orig_mod." + name: weight for name, weight in weights.items()}
    model = vit.restore_model(altered(trained, tmp_path / "x.pt", model=wrapped))[1]
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("part, value, says", [
    ("vit", {"dim": 64}, "do not fit"), ("vit", {"depth": 256, "dim": 16384, "num_heads": 1}, "do not fit"),
    ("vit", {"dim": "32"}, "of type int"), ("vit", {"num_heads": 3}, "--num-heads"),
    ("vit", {"width": 3}, "width"), ("vit", {"num_classes": 0}, "two classes"), ("vit", {"in_channels": 1}, "RGB"),
    ("train", {"epochs": 0}, "--epochs"), ("train", {"amp": "fp8"}, "--amp"),
    ("train", {"model": "resnet18"}, "do not fit"), ("model", {"head.bias": torch.full((10,), torch.nan)}, "finite"),
    ("model", {"head.bias": torch.zeros(11)}, "do not fit"), ("model", {"tail": torch.zeros(1)}, "do not fit"),
    ("mean", [0.5], "not a whole"), ("std", [0.0, 1.0, 1.0], "mean and std"), ("images", None, "not a whole"),
    ("std", [math.inf] * 3, "mean and std"), ("mean", "grey", "not a whole"), ("classes", ["cat"], "classes"),
    ("model", {"head.weight": torch.zeros(1).expand(10, 32)}, "finite"), ("train", {"epochs": 0}, "--epochs"),
    ("model", {"head.bias": torch.full((10,), 1e300, dtype=torch.float64)}, "finite"),
    ("classes", [1] * 10, "classes"), ("history", [], "history"), ("history", [{"epoch": 1}], "history"),
    ("history", [dict.fromkeys(vit.LOG, math.nan)], "history"),
    ("history", [dict.fromkeys(vit.LOG, [])], "not a whole"),
    ("epoch", 7, "history"), ("format", 2, "format is 2")])
def test_a_checkpoint_whose_parts_do_not_fit(trained, tmp_path, part, value, says):
    """Refused before a model is built, however large the sizes that it declares."""
    if isinstance(value, dict):
        value = torch.load(trained, weights_only=True)[part] | value
    with pytest.raises(vit.InputError, match="is not a whole checkpoint") as error:
        vit.load_checkpoint(altered(trained, tmp_path / "x.pt", **{part: value}))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_foreign_optimizers_are_refused(few_shapes, trained, capsys):
    adamw, muon = torch.load(trained, weights_only=True)["optimizers"]
    state = {0: {name: torch.zeros(3) for name in adamw["state"][0]}}
    for optimizers in ([], [{}, {}], [{"state": {7: {}}}] * 2, 3, [muon, adamw],
                       [adamw | {"state": adamw["state"] | state}, muon]):
        altered(trained, "x.pt", optimizers=optimizers)
        vit.SHAPE_COUNTS["train"] = 32                  # few_shapes puts it back
        assert vit.main(["train", "--resume", "x.pt", "--epochs", "2"]) == 2
        assert "optimizers do not fit" in capsys.readouterr().err


class Payload:
    def __reduce__(self):
        return open, ("was-run", "w")


def test_a_checkpoint_cannot_run_code(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    altered(trained, "bad.pt", classes=Payload())
    torch.load("bad.pt", weights_only=False)["classes"].close()
    Path("was-run").unlink()                            # so the payload is live
    with pytest.raises(vit.InputError, match="not a whole checkpoint"):
        vit.load_checkpoint("bad.pt")
    assert not Path("was-run").exists()


# ---- Seeing ---------------------------------------------------------------------------------------


def one_head(matrix):
    return torch.tensor(matrix, dtype=torch.float)[None, None]


def test_rollout_of_two_blocks_by_hand():
    """Block 1: both patches look at patch 2. Block 2: the class token looks at patch 1."""
    A1 = one_head([[1, 0, 0], [0, 0, 1], [0, 0, 1]])
    A2 = one_head([[0, 1, 0], [0, 1, 0], [0, 0, 1]])
    R = vit.rollout_matrix([A1, A2])
    torch.testing.assert_close(R[0, 0], torch.tensor([0.5, 0.25, 0.25]))
    torch.testing.assert_close(R.sum(-1), torch.ones(1, 3))
    torch.testing.assert_close(vit.attention_rollout([A1, A2]), torch.tensor([[0.25, 0.25]]))


def test_rollout_takes_the_mean_of_the_heads():
    heads = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    torch.testing.assert_close(vit.rollout_matrix([heads]),
                               vit.rollout_matrix([heads.mean(1, keepdim=True)]))


def test_rollout_of_uniform_attention_is_flat():
    uniform = [torch.full((1, 3, 65, 65), 1 / 65)] * 6
    row = vit.rollout_matrix(uniform)[0, 0]
    assert row[0] == pytest.approx(0.0307692, abs=1e-6)
    torch.testing.assert_close(row[1:], torch.full((64,), 0.0151442), atol=1e-6, rtol=0)
    torch.testing.assert_close(vit.times_uniform(row[1:]), torch.ones(64))


def test_relevance_clamps_before_the_mean():
    A, G = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3)
    A[0, 0, 0], A[0, 1, 0] = torch.tensor([0.2, 0.6, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    G[0, 0, 0], G[0, 1, 0] = torch.tensor([0.0, 1, -5]), torch.tensor([1.0, -1, 2])
    R = vit.relevance_matrix([A], [G])
    torch.testing.assert_close(R[0, 0] - torch.eye(3)[0], torch.tensor([0.1, 0.3, 0.6]))


def test_relevance_of_two_blocks_by_hand():
    A1 = one_head([[0.1, 0.3, 0.6], [0, 0, 0.4], [0, 0, 0]])
    A2 = one_head([[0, 0.6, 0], [0, 0, 0], [0, 0, 0]])
    ones = [torch.ones(1, 1, 3, 3)] * 2
    torch.testing.assert_close(vit.relevance_matrix([A1, A2], ones)[0, 0], torch.tensor([1.1, 0.9, 0.84]))


def test_relevance_of_a_model():
    """Images do not mix, targets may differ, the mode is kept, frozen weights are no obstacle."""
    model, images = random_model().train().requires_grad_(False), random_images(3, 3, 16, 16)
    together = vit.relevance(model, images, torch.tensor([1, 2, 3]))
    assert together.shape == (3, 16) and model.training and not together.requires_grad
    torch.testing.assert_close(together[1:2], vit.relevance(model, images[1:2], 2), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together[1:2], vit.relevance(model, images[1:2], 5))


def test_relevance_pairs_each_gradient_with_its_block():
    """Only the attention of block 1 has a say in the logit, so only its weights count."""
    model, images = random_model(depth=3), random_images(1, 3, 16, 16)
    with torch.no_grad():
        for block in model.blocks[1:]:
            block.attn.proj.weight.zero_()
    logits, attention = model(images, return_attention=True)
    gradient = torch.autograd.grad(logits[0, 4], attention[0])[0]
    row = (gradient * attention[0]).clamp(min=0).mean(1)[0, 0, 1:]
    torch.testing.assert_close(vit.relevance(model, images, 4)[0], row)


def planted_model():
    """One block, one head, weights by hand: a red patch speaks for class 0, a blue one for class 1.

    Channel 0 of a token is its redness, 1 its blueness; attention is uniform; v moves redness to
    channel 2 and blueness to channel 3; and the head reads these two.
    """
    model = vit.ViT(vit.ViTConfig(image_size=8, patch_size=4, dim=8, depth=1, num_heads=1,
                                  num_classes=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        model.patch_embed.proj.weight[0, 0] = model.patch_embed.proj.weight[1, 2] = 1 / 16
        attn = model.blocks[0].attn
        attn.qkv.weight[16 + 2, 0] = attn.qkv.weight[16 + 3, 1] = 1.0
        attn.proj.weight.copy_(torch.eye(8))
        model.head.weight[0, 2] = model.head.weight[1, 3] = 1.0
    return model


def test_relevance_follows_the_class():
    model, images = planted_model(), torch.zeros(1, 3, 8, 8)
    images[0, 0, :4, 4:] = 1                                    # patch 1 is red
    images[0, 2, 4:, :4] = 1                                    # patch 2 is blue
    red, blue = (vit.relevance(model, images, c)[0] for c in (0, 1))
    assert red.argmax() == 1 and blue.argmax() == 2
    assert red[1] > 0.01 and red[1] > 10 * red[2] and blue[2] > 10 * blue[1]
    _, attention = model(images, return_attention=True)         # these two know of no class
    torch.testing.assert_close(attention[0][0, 0, 0], torch.full((5,), 0.2))
    torch.testing.assert_close(vit.attention_rollout(attention)[0], torch.full((4,), 0.1))


def test_attention_distance():
    def uniform(n):
        return torch.full((2, 3, n, n), 1 / n)

    assert vit.attention_distance([uniform(65)], (8, 8), 4)[0, 2] == pytest.approx(16.5459, abs=1e-4)
    assert vit.attention_distance([uniform(5)] * 2, (2, 2), 4)[1, 0] == pytest.approx(3.41421, abs=1e-5)
    assert vit.attention_distance([torch.eye(5).expand(1, 1, 5, 5)], (2, 2), 4).abs().max() == 0
    up = torch.eye(7)                                           # on a grid of 3 x 2, each looks up
    for patch in range(2, 6):
        up[1 + patch] = torch.eye(7)[1 + patch - 2]
    assert vit.attention_distance([up.expand(1, 1, 7, 7)], (3, 2), 4)[0, 0] == pytest.approx(4 * 4 / 6)


def mass_and_pointing(maps, masks, patch_size):
    """Mass of (n, N-1) maps in the masks (n, S, S), over the masks' share; rate of peaks that touch."""
    share = F.avg_pool2d(masks[:, None].float(), patch_size).flatten(1)             # (n, N-1)
    mass = (maps / maps.sum(1, keepdim=True) * share).sum(1) / share.mean(1)
    return mass.mean().item(), (share.gather(1, maps.argmax(1, keepdim=True)) > 0).float().mean().item()


def test_maps_find_the_object(few_shapes, monkeypatch):
    """A model trained for seconds looks at the coloured figure: far more than an untrained one, or
    than a blob in the middle would. (The mass would be 1 by chance.)"""
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 1600)
    size = "--dim 64 --depth 3 --num-heads 2 --batch-size 16".split()
    assert vit.main(["train", "--data", "shapes", "--epochs", "5", *size, "--device", "cpu"]) == 0
    checkpoint, model, mean, std = vit.restore_model("vit.pt")
    images, _, masks = vit.make_shapes(200, 32, seed=1)
    x, results = vit.normalise(images, mean, std), {}
    torch.manual_seed(0)
    for name, net in (("trained", model), ("untrained", vit.ViT(checkpoint["vit"]).eval())):
        logits, attention = net(x, return_attention=True)
        maps = vit.relevance(net, x, logits.argmax(1))
        results[name, "cls"] = mass_and_pointing(attention[-1].mean(1)[:, 0, 1:], masks, 4)
        results[name, "relevance"] = mass_and_pointing(maps + 1e-12, masks, 4)
    place = torch.arange(8) - 3.5
    blob = torch.exp(-(place[:, None] ** 2 + place**2) / 8).flatten().expand(200, -1)
    blob = mass_and_pointing(blob, masks, 4)
    for name, least in (("cls", 0.65), ("relevance", 0.85)):        # seeds 0 to 3: 0.74 to 1, 0.96 to 1
        mass, pointing = results["trained", name]
        assert mass > 1.5 * blob[0] and mass > 2 * results["untrained", name][0], results
        assert pointing > least > blob[1] + 0.1, results


def test_a_map_of_zeros_stays_zeros():
    assert torch.equal(vit.times_uniform(torch.zeros(2, 9)), torch.zeros(2, 9))


def test_a_map_of_zeros_and_odd_sizes_can_be_drawn(tmp_path):
    """Weights of zero: uniform attention, relevance all zero. Also one head, and many blocks."""
    model = random_model(depth=9, num_heads=1, num_classes=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    photo = Image.new("RGB", (90, 30), "red")
    vit.draw_picture(tmp_path / "p.png", photo, vit.fit(photo, 16), model, torch.zeros(3, 1, 1),
                     torch.ones(3, 1, 1), ["a", "b $x", "c" * 99])
    assert size_of(tmp_path / "p.png") == (1600, 900)


# ---- The command line -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, trained):
    """A folder with a small checkpoint and files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("workshop")
    (root / "vit.pt").write_bytes(trained.read_bytes())
    make_folder(root / "good")
    make_folder(root / "flat", splits=("photos",))
    make_folder(root / "lonely", classes=("cat",))
    make_folder(root / "odd", splits=("train",))
    make_folder(root / "odd", splits=("test",), classes=("cat", "cow"))
    make_folder(root / "hollow")
    (root / "hollow/train/bird").mkdir()
    make_folder(root / "broken")
    (root / "broken/train/dog/3.png").write_bytes(b"not an image")
    (root / "bare/train").mkdir(parents=True)
    (root / "bare/test").mkdir()
    (root / "text.png").write_text("hello")
    (root / "empty.png").touch()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (99, 99, 3), dtype=np.uint8)).save(
        root / "whole.jpg")
    (root / "cut.jpg").write_bytes((root / "whole.jpg").read_bytes()[:2000])
    (root / "file").touch()
    (root / "log.csv").mkdir()
    Image.new("F", (9, 9), 0.5).save(root / "float.tif")
    train = torch.load(trained, weights_only=True)["train"]
    altered(trained, root / "longer.pt", train=train | {"epochs": 3})
    cnn = vit.make_model("resnet18", vit.ViTConfig()).state_dict()
    altered(trained, root / "cnn.pt", train=train | {"model": "resnet18"}, model=cnn)
    return root


BAD = [
    ("", "train"), ("fly", "fly"), ("train --epoch 3", "--epoch"), ("train --epochs many", "many"),
    ("train --epochs 0", "--epochs"), ("train --epochs -3", "-3"), ("train --batch-size 0", "--batch-size"),
    ("train --lr nan", "--lr"), ("train --muon-lr inf", "--muon-lr"), ("train --warmup 1.5", "--warmup"),
    ("train --seed -1", "--seed"), ("train --optimizer sgd", "sgd"), ("train --amp fp8", "fp8"),
    ("train --image-size 30", "--patch-size 4"), ("train --dim 100", "--num-heads 3"),
    ("train --variant XXL", "XXL"), ("train --data nowhere", "nowhere"), ("train --data flat", "train/CLASS"),
    ("train --data bare", "bare/train"), ("train --data lonely --batch-size 2", "one class"),
    ("train --data odd --batch-size 2", "cow"), ("train --data hollow", "bird"),
    ("train --data broken --batch-size 2", "broken/train/dog/3.png"), ("train --data good", "--batch-size 128"),
    ("train --out no/where.pt", "no/where.pt"), ("train --out file/x.pt", "file"),
    ("train --out good", "good"), ("train --resume missing.pt", "missing.pt"),
    ("train --resume text.png", "text.png"), ("train --resume vit.pt", "--epochs"),
    ("train --resume vit.pt --epochs 3 --seed 4 --dim 64", "--dim is 32, --seed is 0;"),
    ("train --resume vit.pt --epochs 3 --data good", "--data"),
    ("train --resume longer.pt --epochs 1", "cannot be made shorter"), ("train --mlp-ratio 0.1 --dim 9", "--mlp-ratio"),
    ("train --data good --batch-size 2 --image-size 4096 --patch-size 64", "GiB"),
    ("train --data shapes --image-size 512", "256"), ("train --model cnn", "cnn"),
    ("train --device cuda", "--device cuda"), ("train --label-smoothing 1", "--label"),
    ("viz --ckpt cnn.pt --image whole.jpg", "no attention to draw"), ("viz --ckpt vit.pt --image float.tif", "grey"),
    (f"train --out {'x' * 300}.pt", "too long"), ("viz --ckpt vit.pt --image test:1 --data nowhere", "nowhere"),
    ("viz --ckpt vit.pt --target cow", "cow"), ("viz --ckpt vit.pt --target 'red disc'", "--image"),
    ("train --data shapes --batch-size 8 --out log.pt", "log.csv"), ("viz --ckpt vit.pt --out x.pdf", "x.pdf"),
    ("eval", "--ckpt"), ("eval --ckpt missing.pt", "missing.pt"), ("eval --ckpt vit.pt --data good", "good"),
    ("eval --ckpt vit.pt --data nowhere", "nowhere"), ("viz --ckpt missing.pt --image test:0", "missing.pt"),
    ("viz --ckpt good --image test:0", "good"), ("viz --ckpt vit.pt --image missing.png", "missing.png"),
    ("viz --ckpt vit.pt --image text.png", "text.png"), ("viz --ckpt vit.pt --image empty.png", "empty.png"),
    ("viz --ckpt vit.pt --image cut.jpg", "cut.jpg"), ("viz --ckpt vit.pt --image good", "good"),
    ("viz --ckpt vit.pt --image test:10", "test:9"), ("viz --ckpt vit.pt --image test:-1", "test:-1"),
    ("viz --ckpt vit.pt --image whole.jpg --out no/x.png", "no/x.png"),
    ("viz --ckpt vit.pt --image whole.jpg --out file/x.png", "file"),
    ("viz --ckpt vit.pt --image whole.jpg --out x.jpg", "x.jpg"),
    ("viz --ckpt vit.pt --image whole.jpg --out whole.png/..", "--out"),
    ("viz --ckpt vit.pt --image whole.jpg text.png --out x.png", "--out"),
    ("viz --ckpt vit.pt --image whole.jpg good/whole.jpg", "same"),
    ("viz --ckpt vit.pt --image text.png --out text.png", "same"), ("viz --ckpt vit.pt --image ''", "image"),
    (f"viz --ckpt vit.pt --image {'x' * 300}.png", "too long"), ("train --out vit.pt/", "vit.pt/"),
    ("viz --ckpt vit.pt --image test:0 --out x.png/", "x.png/"),
    ("train --resume ''", "checkpoint"), ("viz --ckpt text.png --image whole.jpg", "text.png"),
]


@pytest.mark.parametrize("command, names", BAD)
def test_bad_input_gets_one_sentence(workshop, monkeypatch, capsys, command, names):
    monkeypatch.chdir(workshop)
    monkeypatch.setitem(vit.SHAPE_COUNTS, "train", 32)
    monkeypatch.setitem(vit.SHAPE_COUNTS, "test", 10)
    monkeypatch.setattr(vit, "MOST_BYTES", 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vit, "train_epoch", lambda *args: pytest.fail("training began"))
    files = {path: path.stat().st_mtime_ns for path in workshop.rglob("*")}
    assert vit.main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert error.startswith("vit.py: ") and error.count("\n") == 1 and names in error
    assert {path: path.stat().st_mtime_ns for path in workshop.rglob("*")} == files


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full, /proc or setrlimit")


def test_bad_input_in_a_process_of_its_own(tmp_path):
    bad = [("train --epochs 0", "--epochs"), ("nothing", "nothing"), ("train --out missing/vit.pt", "missing"),
           ("viz --ckpt missing.pt --image test:0", "missing.pt")]
    started = [subprocess.Popen([sys.executable, HERE / "vit.py", *command.split()], text=True, cwd=tmp_path,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command, _ in bad]
    for process, (_, names) in zip(started, bad):
        out, error = process.communicate()
        assert process.returncode == 2 and not out and names in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def small_process(command, before="", **options):
    """Start `python vit.py` on a few shapes, with lines of Python run first."""
    code = ("import sys, torch, vit; torch.set_num_threads(1)\n"
            "vit.SHAPE_COUNTS.update(train=160, test=20)\n" + before + "\nsys.exit(vit.main(sys.argv[1:]))")
    return subprocess.Popen([sys.executable, "-c", code, *command.split()], text=True,
                            env={**os.environ, "PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""},
                            **{"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, **options})


@on_linux
def test_a_standard_output_that_takes_nothing(tmp_path):
    """A full disk, and a reader that has gone: a sentence. None at all: the work is done."""
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full, os.fdopen(write, "w") as gone:
        started = [small_process(f"{TINY_TRAIN} --epochs 1 --out {n}.pt", cwd=tmp_path, stdout=out)
                   for n, out in enumerate((full, gone))]
        close = "import os; os.close(1); sys.stdout = None"
        quiet = small_process(f"{TINY_TRAIN} --epochs 1", close, cwd=tmp_path)
        for process in started:
            error = process.communicate()[1]
            assert process.returncode == 2 and "standard output" in error and error.count("\n") == 1
    assert quiet.communicate()[1] == "" and quiet.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"vit.pt", "vit.csv", "vit.png"}


@on_linux
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """A limit on the size of a file stands for it; it comes after the first epoch."""
    limit = ("import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nsave = vit.save_run\n"
             "def save_run(run, *rest):\n    if len(run.history) == 2:\n"
             "        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n    save(run, *rest)\n"
             "vit.save_run = save_run")
    process = small_process(f"{TINY_TRAIN} --epochs 3", limit, cwd=tmp_path)
    error = process.communicate()[1]
    assert process.returncode == 2 and "vit.pt could not be written" in error and error.count("\n") == 1
    assert vit.load_checkpoint(tmp_path / "vit.pt")["epoch"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"vit.pt", "vit.csv", "vit.png"}


@on_linux
def test_a_full_memory_says_so(tmp_path):
    limit = ("import resource; used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
             "resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 10**8,) * 2)")
    process = small_process(f"{TINY_TRAIN} --epochs 1 --image-size 64 --patch-size 2 --batch-size 160", limit,
                            cwd=tmp_path)
    error = process.communicate()[1]
    assert process.returncode == 2 and error.count("\n") == 1 and "--batch-size 80," in error


def kill_and_resume(folder, moment):
    """A run of 4 epochs that kills itself in the middle of one, as by SIGKILL, and is resumed."""
    command = f"{TINY_TRAIN} --epochs 4 --dropout 0.1 --drop-path 0.1 --amp fp16"
    mixed = "vit.strong_share = lambda epochs: 0.5\nreal = vit.load_data\n" \
        "def load_data(*args):\n    data = real(*args)\n    data.alter = True\n    return data\n" \
        "vit.load_data = load_data\n"
    kill = "import os, signal\nsteps, update = [], vit.update\ndef stop(*args):\n    steps.append(1)\n" \
        f"    if len(steps) == {moment}:\n        os.kill(os.getpid(), signal.SIGKILL)\n" \
        "    return update(*args)\nvit.update = stop"
    whole = small_process(f"{command} --out whole.pt", mixed, cwd=folder)           # both at once
    cut = small_process(f"{command} --out cut.pt", mixed + kill, cwd=folder)
    assert (cut.communicate()[1], cut.returncode) == ("", -9)
    resumed = small_process("train --resume cut.pt", mixed, cwd=folder)
    for process in (whole, resumed):
        assert (process.communicate()[1], process.returncode) == ("", 0)
    return vit.load_checkpoint(folder / "whole.pt"), vit.load_checkpoint(folder / "cut.pt")


@on_linux
def test_a_killed_run_resumes_exactly(tmp_path):
    """With shuffle, policy, mixing, dropout, both optimizers and the scaler: bit for bit the same."""
    whole, cut = kill_and_resume(tmp_path, moment=25)           # of 40: 10 steps an epoch
    assert whole["epoch"] == cut["epoch"] == 4 and whole["scaler"] == cut["scaler"] != {}
    assert all(torch.equal(weight, cut["model"][name]) for name, weight in whole["model"].items())
    for a, b in zip(whole["optimizers"], cut["optimizers"], strict=True):
        for key, state in a["state"].items():
            assert all(torch.equal(value, b["state"][key][name]) for name, value in state.items())
    for a, b in zip(whole["history"], cut["history"], strict=True):
        assert all(a[key] == b[key] for key in vit.LOG if "second" not in key)


@pytest.mark.slow
def test_a_checkpoint_survives_fifty_kills(tmp_path):
    """At random moments: the file is always a whole checkpoint, the old or the new one."""
    chance = random.Random(0)
    run = f"{TINY_TRAIN} --epochs 100000 --out vit.pt"
    assert small_process(f"{TINY_TRAIN} --epochs 1", cwd=tmp_path).communicate()[1] == ""
    last = vit.load_checkpoint(tmp_path / "vit.pt")["epoch"]
    for kill in range(50):
        process = small_process(f"{run} --resume vit.pt", cwd=tmp_path)
        while vit.load_checkpoint(tmp_path / "vit.pt")["epoch"] == last:        # until it is at work
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(chance.random())
        process.kill()
        process.communicate()
        now = vit.load_checkpoint(tmp_path / "vit.pt")["epoch"]
        assert now > last
        last = now


def test_help_and_version(capsys):
    assert vit.main(["--version"]) == 0 and vit.__version__ in capsys.readouterr().out
    assert vit.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for group in ("training:", "model:"):
        assert f"\n{group}\n" in text
    assert "--num-heads" in text and "(default: 0.006)" in text and "--num-classes" not in text


def test_a_variant_sets_the_size_and_what_is_typed_wins(monkeypatch):
    def stop(config, vit_config, checkpoint):
        made.append(vit_config)
        raise KeyboardInterrupt

    made = []
    monkeypatch.setattr(vit, "prepare", stop)
    assert vit.main("train --variant S/16 --depth 3 --patch-size 8".split()) == 130
    assert made == [vit.ViTConfig(dim=384, depth=3, num_heads=6, patch_size=8)]


# ---- The texts ------------------------------------------------------------------------------------


def readme_commands():
    text = (HERE / "README.md").read_text()
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    commands = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(c)[2:] for c in commands if c.startswith("python vit.py")]


def test_the_commands_of_the_readme_and_the_docstring_parse():
    docstring = [shlex.split(line.split("   ")[0])[2:] for line in map(str.strip, vit.__doc__.splitlines())
                 if line.startswith("python vit.py")]
    commands = readme_commands() + docstring
    assert {command[0] for command in commands} >= {"train", "viz"} and len(commands) > 8
    for command in commands:
        vit.make_parser().parse_args(command)


def test_the_readme_shows_what_exists():
    text = (HERE / "README.md").read_text()
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)|src=\"([^\"]+)\"", text):
        assert (HERE / (target[0] or target[1])).is_file(), target
    for option in re.findall(r"`(--[a-z-]+)", text):
        assert option in vit.make_parser().parse_args.__self__._subparsers._group_actions[0].choices[
            "train"].format_help() or option in ("--ckpt", "--image", "--version"), option


def test_the_library_example_of_the_readme_runs(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    Image.new("RGB", (50, 40), "teal").save("cat.png")
    names = {}
    exec(re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)[1], names)
    assert names["logits"].shape == (1, 10)
    assert names["rollout"].shape == names["relevance"].shape == (1, math.prod(names["model"].grid))


def test_the_file_keeps_to_its_size():
    source = (HERE / "vit.py").read_text()
    assert max(map(len, source.splitlines())) <= 100
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name
