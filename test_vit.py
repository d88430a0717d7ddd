"""The proof that vit.py does what it says: python -m pytest

Each test holds it against something that knows the answer independently: torchvision's own Vision
Transformer, PyTorch's attention, numbers worked out by hand, or a property that must hold whatever
the weights are. All run offline and need no GPU.
"""

import ast, csv, itertools, math, os, pickle, re, shlex, shutil, signal, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from torchvision.datasets import CIFAR10
from torchvision.models.vision_transformer import VisionTransformer

import vit

HERE = Path(__file__).parent
torch.set_num_threads(1)         # the models here are small: two threads would only wait
SOURCE, README = (HERE / "vit.py").read_text(), (HERE / "README.md").read_text()
SMALL = dict(image_size=16, patch_size=4, dim=32, depth=2, num_heads=2)
SHAPES = "train --data shapes --image-size 16 --dim 32 --depth 2 --num-heads 2 --batch-size 16 --device cpu"
CLOSE = dict(atol=1e-5, rtol=1e-5)
CPU = torch.device("cpu")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full, /proc or setrlimit")

def cli(*commands):
    """Each command line through vit.main; the exit code of the last, the others must succeed."""
    codes = [vit.main(shlex.split(command)) for command in commands]
    assert not any(codes[:-1])
    return codes[-1]

def random_model(seed=0, **options):
    """A model in eval mode with every parameter random, so that no zero or one hides an error."""
    model, generator = vit.ViT(vit.ViTConfig(**(SMALL | options))).eval(), torch.Generator().manual_seed(seed)
    model.load_state_dict({name: 0.2 * torch.randn(p.shape, generator=generator)
                           + bool(re.search("norm.*weight", name)) for name, p in model.named_parameters()})
    return model

def random_images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

@pytest.fixture
def few_shapes(monkeypatch, tmp_path):
    """A short version of the built-in data, in an empty folder that is also the working one."""
    monkeypatch.setattr(vit, "SHAPE_COUNTS", {"train": 64, "test": 20})
    monkeypatch.chdir(tmp_path)
    return tmp_path

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The checkpoint of a small model after an epoch of a few shapes."""
    out = tmp_path_factory.mktemp("trained") / "vit.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vit, "SHAPE_COUNTS", {"train": 32, "test": 10})
        assert cli(f"{SHAPES} --epochs 1 --out '{out}'") == 0
    return out

def altered(path, to, **parts):
    """A copy of a checkpoint with other parts."""
    torch.save(torch.load(path, weights_only=True) | parts, to)
    return to

def interrupt(*args):
    raise KeyboardInterrupt

def size_of(path):
    with Image.open(path) as image:
        return image.size

def make_folder(root, classes=("cat", "dog"), splits=("train", "test")):
    """A folder of noise images: root/SPLIT/CLASS/0.png to 7.png, 20 x 16 pixels."""
    rng = np.random.default_rng(0)
    for folder in (root / split / name for split in splits for name in classes):
        folder.mkdir(parents=True)
        for i in range(8):
            Image.fromarray(rng.integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(folder / f"{i}.png")

# ---- The model ------------------------------------------------------------------------------------
def test_returned_attention():
    """That of each block in order, part of the graph; and to ask for it changes nothing."""
    model, images, seen = random_model(), random_images(3, 3, 16, 16), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda attn, args, result: seen.append(result[1]))
    logits, attention = model(images, return_attention=True)
    assert logits.shape == (3, 10) and [A.shape for A in attention] == [(3, 2, 17, 17)] * 2
    assert all(torch.equal(A, B) for A, B in zip(attention, seen, strict=True))
    assert torch.equal(model(images), logits)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(logits.sum(), attention))

@pytest.mark.parametrize("name, count", [("cifar", 2_693_578), ("Ti/16", 5_717_416), ("S/16", 22_050_664),
                                         ("B/16", 86_567_656), ("L/16", 304_326_632)])
def test_parameter_counts(name, count):
    """The counts that torchvision, DeiT and the paper's code have, and that the table prints."""
    large = {} if name == "cifar" else dict(image_size=224, patch_size=16, num_classes=1000)
    with torch.device("meta"):
        model = vit.ViT(vit.ViTConfig(**large, **dict(zip(("dim", "depth", "num_heads"), vit.VARIANTS[name]))))
    assert sum(p.numel() for p in model.parameters()) == count
    assert f"{count:,}" in re.search(rf'"{name}":.*', SOURCE).group()
    assert name != "cifar" or model.config == vit.ViTConfig()       # the default

@pytest.mark.parametrize("size, patch, dim, depth, heads, ratio", [
    (32, 4, 192, 6, 3, 4.0), (16, 4, 32, 1, 1, 2.0), (48, 8, 48, 3, 4, 4.0), (224, 16, 64, 2, 8, 3.0)])
def test_logits_equal_torchvision(size, patch, dim, depth, heads, ratio):
    """It also pins the names of the parameters, which are the field's."""
    ours = random_model(image_size=size, patch_size=patch, dim=dim, depth=depth, num_heads=heads,
                        mlp_ratio=ratio, num_classes=7)
    theirs = VisionTransformer(image_size=size, patch_size=patch, num_layers=depth, num_heads=heads,
                               hidden_dim=dim, mlp_dim=int(dim * ratio), num_classes=7).eval()
    rename = {r"^patch_embed\.proj\.": "conv_proj.", r"^cls_token$": "class_token", r"\.norm1\.": ".ln_1.",
              r"^pos_embed$": "encoder.pos_embedding", r"\.attn\.qkv\.": ".self_attention.in_proj_",
              r"\.attn\.proj\.": ".self_attention.out_proj.", r"\.norm2\.": ".ln_2.", r"mlp\.fc1": "mlp.0",
              r"mlp\.fc2": "mlp.3", r"^blocks\.": "encoder.layers.encoder_layer_", r"^norm\.": "encoder.ln.",
              r"^head\.": "heads.head."}
    state = ours.state_dict()
    for old, new in rename.items():
        state = {re.sub(old, new, name): value for name, value in state.items()}
    theirs.load_state_dict(state)
    images = random_images(2, 3, size, size)
    with torch.no_grad():
        a, b = ours(images), theirs(images)
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
    assert fused[0] is None
    assert_close(steps[:2], pytorch[:2], **CLOSE)
    for others in (fused, pytorch):
        assert_close(steps[1:], others[1:], atol=1e-4, rtol=1e-4)

def test_worked_example_of_section_3():
    """q, k and v as in the text, planted in the weights: token i is one-hot, so column i is its row."""
    attn, k = vit.Attention(vit.ViTConfig(dim=4, num_heads=1, patch_size=4)), torch.zeros(4, 4)
    k[0, 1] = k[0, 2] = k[1, 2] = 2
    weight, zeros = torch.cat([torch.ones(4, 4), k, torch.eye(4)]), torch.zeros(12)
    attn.load_state_dict({"qkv.weight": weight, "qkv.bias": zeros, "proj.weight": torch.eye(4),
                          "proj.bias": zeros[:4]})
    out, weights = attn(torch.eye(4)[None, :3])
    expected, unscaled = torch.tensor([0.090, 0.245, 0.665]), torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    assert_close(weights[0, 0, 0], expected, atol=5e-4, rtol=0)
    assert_close(out[0, 0], F.pad(expected, (0, 1)), atol=5e-4, rtol=0)
    assert_close(unscaled, torch.tensor([0.016, 0.117, 0.867]), atol=5e-4, rtol=0)

def test_patch_embedding_is_cut_and_multiply():
    model, images = random_model(), random_images(2, 3, 16, 16)
    proj, patch = model.patch_embed.proj, images[1, :, 4:8, 8:12].reshape(-1)   # second row, third column:
    expected = proj.weight.reshape(32, -1) @ patch + proj.bias                  # token 1 * 4 + 2
    assert_close(model.patch_embed(images)[1, 6], expected, **CLOSE)

def test_positions_are_what_tells_places_apart():
    model, images = random_model(), random_images(2, 3, 16, 16)
    patches = F.unfold(images, 4, stride=4)[:, :, torch.randperm(16)]
    shuffled = F.fold(patches, (16, 16), 4, stride=4)
    assert not torch.allclose(model(images), model(shuffled), atol=1e-3)
    with torch.no_grad():
        model.pos_embed.zero_()
    assert_close(model(images), model(shuffled), **CLOSE)

def test_images_of_a_batch_do_not_mix():
    model, images = random_model().train(), random_images(4, 3, 16, 16)
    before, images[2] = model(images), images[2] + 1
    after = model(images)
    assert_close(after[[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.allclose(after[2], before[2], atol=1e-3)

def test_gradient_reaches_every_parameter():
    model = random_model().train()
    F.cross_entropy(model(random_images(4, 3, 16, 16)), torch.tensor([0, 1, 2, 3])).backward()
    assert not [name for name, p in model.named_parameters() if not p.grad.abs().sum() > 0]

def test_sine_positions():
    table = vit.sincos_positions(3, 5, 8)               # row 2, column 3: frequencies 1 and 1/10
    waves = [f(place * rate) for place in (2, 3) for f in (math.sin, math.cos) for rate in (1, 0.1)]
    assert_close(table[2 * 5 + 3], torch.tensor(waves))
    assert table.shape == (15, 8) and vit.sincos_positions(2, 2, 7).shape == (4, 7)

def test_positions_for_another_grid():
    model = random_model()
    assert model.positions(4, 4) is model.pos_embed
    with torch.no_grad():                               # a plane: the row number in every channel
        model.pos_embed[0, 1:] = torch.arange(4.0).repeat_interleave(4)[:, None]
    longer = model.positions(8, 2)
    rows = longer[0, 1:].reshape(8, 2, 32)
    assert torch.equal(longer[:, 0], model.pos_embed[:, 0])
    assert_close(rows[:, 0], rows[:, 1])
    assert (rows[1:, 0, 0] > rows[:-1, 0, 0]).all()     # rows still go up: not swapped with columns
    assert model(random_images(1, 3, 32, 8)).shape == (1, 10)
    with pytest.raises(ValueError, match="17 x 16"):
        model(random_images(1, 3, 17, 16))

def test_initialisation():
    torch.manual_seed(0)
    model = vit.ViT(vit.ViTConfig())
    block, x = model.blocks[0], torch.randn(2, 65, 192)
    q, k, v = block.attn.qkv(x).reshape(2, 65, 3, 3, 64).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(2, 3) / 8                          # as section 3 supposes
    tokens = model.patch_embed(torch.randn(2, 3, 32, 32))
    assert all(abs(part.std() - 1) < 0.1 for part in (tokens, block.mlp.fc1(x), q, k, v, scores))
    assert torch.equal(block(x)[0], x)                          # a block starts as the identity
    loss = F.cross_entropy(model(torch.randn(64, 3, 32, 32)), torch.arange(64) % 10)
    assert abs(loss - math.log(10)) < 0.1

def test_drop_path():
    torch.manual_seed(0)
    layer, x = vit.DropPath(0.25), torch.ones(4000, 2, 3)
    assert torch.equal(layer.eval()(x), x)
    out = layer.train()(x)
    assert (out == out[:, :1, :1]).all()                        # a branch is dropped whole
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.75]) and abs(out.mean() - 1) < 0.05
    rates = [block.drop_path.rate for block in vit.ViT(vit.ViTConfig(drop_path=0.3, depth=4)).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])

@pytest.mark.parametrize("name, side, patch, digits", [("cifar", 32, 4, 2), ("B/16", 224, 16, 1)])
def test_cost_of_the_text(name, side, patch, digits):
    """12ND^2 + 2N^2D against PyTorch's count of a block (two operations a multiply-add); the table."""
    (dim, depth, heads, size), N = vit.VARIANTS[name], (side // patch) ** 2 + 1
    assert size == patch
    linear, pairs = 12 * N * dim**2, 2 * N**2 * dim
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        vit.Block(vit.ViTConfig(dim=dim, num_heads=heads), drop_path=0)(torch.empty(1, N, dim))
    assert counter.get_total_flops() == 2 * (linear + pairs)
    numbers = [f"{number / 1e6:.1f} M" for number in (linear, pairs, linear + pairs)]
    total = f"{depth * (linear + pairs) / 1e9:.{digits}f} G"
    assert re.search(rf"{side}/{patch} +{N} +{dim} +" + " +".join(map(re.escape, [*numbers, total])), SOURCE)

# ---- Data -----------------------------------------------------------------------------------------
def test_shapes():
    images, labels, masks = vit.make_shapes(200, 32, seed=3)
    assert images.dtype == torch.uint8 and images.shape == (200, 3, 32, 32)
    assert masks.dtype == torch.bool and masks.shape == (200, 32, 32)
    assert labels.bincount(minlength=10).tolist() == [20] * 10
    assert all(map(torch.equal, (images, labels, masks), vit.make_shapes(200, 32, seed=3)))
    assert not torch.equal(images, vit.make_shapes(200, 32, seed=4)[0])
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

def noise_data(augmented=True):
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8), torch.arange(64) % 4
    return vit.Data(images, labels, images, labels, list("abcd"), torch.full((3, 1, 1), 0.5),
                    torch.full((3, 1, 1), 0.25), augmented)

def test_policy_changes_pixels_and_leaves_labels():
    data = noise_data(augmented=False)
    images, labels = vit.augment(data.images, data.labels, data, policy_prob=1.0)
    assert torch.equal(labels, data.labels)
    plain = vit.normalise(data.images, data.mean, data.std)
    changed = [not torch.equal(x, p) and not torch.equal(x, p.flip(-1)) for x, p in zip(images, plain)]
    assert 0.5 < sum(changed) / 64 <= 1
    slices = torch.tensor(changed).reshape(8, 8).float().mean(1)
    assert slices.unique().numel() > 1 or slices[0] == 1        # an operation for each slice

def test_mixed_labels_say_how_much_of_whom():
    """Images that are the number of their class everywhere: then the mean of a mixed image must be
    the mean under its label, whichever way it was mixed."""
    data = noise_data(augmented=False)
    data.images = (60 * data.labels[:, None, None, None]).expand(-1, 3, 16, 16).to(torch.uint8)
    for _ in range(8):
        images, labels = vit.augment(data.images, data.labels, data, mix_prob=1.0)
        assert labels.shape == (64, 4)
        assert_close(labels.sum(1), torch.ones(64))
        seen = (images.mean(dim=(1, 2, 3)) * 0.25 + 0.5) * 255
        assert_close(seen, 60 * (labels @ torch.arange(4.0)), atol=1e-2, rtol=1e-4)

def test_an_epoch_follows_its_schedule(monkeypatch):
    """Of the rate, the order, and the strong alterations; mixing ends before the run does."""
    assert [vit.augment_strength(epochs) for epochs in (1, 10, 40, 70, 300)] == [0, 0, 0.5, 1, 1]
    seen, real = [], vit.augment

    def spy(images, labels, data, policy_prob, mix_prob):
        seen.append((policy_prob, mix_prob, labels.tolist()))
        return real(images, labels, data, policy_prob, mix_prob)
    monkeypatch.setattr(vit, "augment", spy)
    config, model = vit.TrainConfig(epochs=100, batch_size=32), random_model(num_classes=4)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = vit.Run(model.config, model, vit.make_optimizers(model, config), scaler, [])
    for done, augmented in ((0, True), (89, True), (90, True), (99, True), (0, False)):
        run.history = [None] * done
        loss, accuracy, _ = vit.train_epoch(run, noise_data(augmented), config, torch.float32)
        assert math.isfinite(loss) and 0 <= accuracy <= 1
        rate = vit.learning_rate(2 * done + 1, 200, 20, config.lr)          # two steps an epoch
        assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    assert [call[:2] for call in seen[::2]] == [(1, 0.5), (1, 0.5), (1, 0), (1, 0), (0, 0)]
    assert seen[0][2] != seen[2][2]                                         # another order

def test_cifar10_as_torchvision_reads_it(monkeypatch, tmp_path):
    """torchvision's class on batch files of the original's layout; only its checksums are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, *md5: os.path.isfile(path))
    folder, rng, names = tmp_path / "data" / CIFAR10.base_folder, np.random.default_rng(0), list("abcdefghij")
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

def test_folders_with_names_of_every_kind(tmp_path, monkeypatch, capsys):
    """Spaces, letters of other scripts and signs, in folders, classes and files; val instead of test."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("mes données"), classes=("café noir", "猫 $x_1$"), splits=("train", "val"))
    data = vit.load_data(vit.TrainConfig(data="mes données", batch_size=4), 16, CPU)
    assert data.classes == ["café noir", "猫 $x_1$"] and data.images.shape == (16, 3, 16, 16)
    with Image.open("mes données/train/café noir/0.png") as image:              # the middle, unscaled
        assert (data.images[0].permute(1, 2, 0).numpy() == np.asarray(image)[:, 2:18]).all()
    Image.new("RGB", (40, 40)).save("Käfer 猫.png")
    assert cli(f"{SHAPES} --data 'mes données' --epochs 1 --batch-size 8 --out 'modèle 1.pt'",
               "viz --ckpt 'modèle 1.pt' --target '猫 $x_1$' --image 'Käfer 猫.png' test:1",
               "eval --ckpt 'modèle 1.pt'") == 0
    assert size_of("Käfer 猫_attention.png") == (1600, 900) and not capsys.readouterr().err

def test_images_from_the_world(tmp_path, monkeypatch, capsys):
    def read(image, name, **options):
        image.save(tmp_path / name, **options)
        return vit.open_image(tmp_path / name)

    def corner(*args, **options):
        return read(*args, **options).getpixel((0, 0))
    half, exif = ImageOps.expand(Image.new("RGB", (20, 20), "white"), (20, 0, 0, 0)), Image.Exif()
    exif[0x0112] = 6                                    # "turn a quarter clockwise to see it upright"
    turned = read(half, "turned.jpg", exif=exif)
    assert turned.size == (20, 40) and turned.getpixel((10, 5))[0] < 20 < 235 < turned.getpixel((10, 35))[0]
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    assert corner(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "clear.png") == (128, 128, 128)
    assert corner(palette, "palette.png", transparency=0) == (128, 128, 128)
    assert corner(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "print.jpg")[0] > 200
    assert corner(Image.new("L", (1, 1), 7), "dot.png") == (7, 7, 7)
    ramp = Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16))
    assert len(read(ramp, "deep.png").getcolors()) > 250 and not capsys.readouterr().err
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    assert corner(red, "a.gif", save_all=True, append_images=[blue]) == (255, 0, 0)     # the first frame
    assert vit.open_image(tmp_path / "a.gif").info["frames"] == 2
    for limit in (700, 300):                            # of pixels: a warning of Pillow's, and an error
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(vit.InputError, match="turned.jpg.*800 pixels"):
            vit.open_image(tmp_path / "turned.jpg")

def test_the_crop_keeps_the_middle():
    image = ImageOps.pad(Image.new("RGB", (40, 40), "white"), (400, 40))
    assert vit.center_square(image) == (180, 0, 220, 40)
    assert vit.center_crop(image, 16).getcolors() == [(256, (255, 255, 255))]
    assert vit.center_crop(Image.new("RGB", (1, 1)), 32).size == (32, 32)

# ---- Optimisation ---------------------------------------------------------------------------------
def test_learning_rate_at_its_corners():
    rate = [vit.learning_rate(step, 100, 10, peak=2.0, final=0.5) for step in range(101)]
    assert rate[0] == pytest.approx(2 / 11) and rate[10] == 2.0 == max(rate)
    assert rate[55] == pytest.approx((2 + 0.5) / 2) and rate[100] == pytest.approx(0.5)
    assert all(a < b for a, b in zip(rate[:10], rate[1:11])) and vit.learning_rate(0, 5, 0, peak=1.0) == 1.0
    assert all(a > b for a, b in zip(rate[10:], rate[11:]))

@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_each_parameter_has_its_optimizer_and_decay(optimizer):
    model, where = random_model(), []
    config = vit.TrainConfig(optimizer=optimizer.lower(), weight_decay=0.3, lr=0.1, muon_lr=0.2)
    for o, g in ((o, g) for o in vit.make_optimizers(model, config) for g in o.param_groups):
        where += [(id(p), (type(o).__name__, g["weight_decay"], g["peak"])) for p in g["params"]]
    matrices = (optimizer, 0.3, 0.2 if optimizer == "Muon" else 0.1)
    expected = {name: ("AdamW", 0.0, 0.1) for name, _ in model.named_parameters()} | dict.fromkeys(
        ("patch_embed.proj.weight", "head.weight"), ("AdamW", 0.3, 0.1)) | {
        f"blocks.{i}.{name}.weight": matrices for i in (0, 1) for name in
        ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert sorted(where) == sorted((id(p), expected[name]) for name, p in model.named_parameters())

def small_step(scaler, clip, poison=False):
    """One `update` by two SGDs of rate 1: how far the parameters moved, and the gradient's length."""
    torch.manual_seed(0)
    model = random_model()
    halves = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizers = [torch.optim.SGD(half, lr=1.0) for half in halves]
    before = [p.detach().clone() for p in model.parameters()]
    loss = 100 * model(random_images(4, 3, 16, 16)).square().mean()
    if poison:
        halves[0][0].register_hook(lambda grad: grad * torch.nan)
    norm = vit.update(loss, model, optimizers, scaler, clip)
    moved = torch.stack([(a.detach() - b).norm() for a, b in zip(model.parameters(), before)]).norm()
    return moved.item(), norm.item()

@pytest.mark.parametrize("scale", [None, 2.0**16])
def test_clipping_acts_on_unscaled_gradients(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    moved, norm = small_step(scaler, clip=0.5)
    assert norm > 1 and moved == pytest.approx(0.5, rel=1e-3)
    moved, same_norm = small_step(scaler, clip=1e6)
    assert same_norm == pytest.approx(norm, rel=1e-3) == pytest.approx(moved, rel=1e-2)
    if scale:                           # a NaN in one group changes no parameter, and the scaler notices it
        moved, norm = small_step(scaler, clip=1.0, poison=True)
        assert math.isnan(norm) and moved == 0 and scaler.get_scale() == scale / 2

def test_precision_and_device(monkeypatch):
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for flags, dtype in (({"amx_bf16": True}, bf16), ({"avx512_bf16": True}, bf16), ({"avx2": True}, fp32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: {"amx_bf16": False} | flags, raising=False)
        assert vit.pick_precision("auto", CPU) == dtype
    for capability, dtype in (((7, 5), fp16), ((8, 0), bf16), ((9, 0), bf16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert vit.pick_precision("auto", torch.device("cuda")) == dtype
    assert vit.pick_precision("auto", torch.device("mps")) == fp32 and vit.pick_precision("fp16", CPU) == fp16
    for cuda_there, mps_there, name in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda_there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps_there)
        assert vit.pick_device("auto").type == name

# ---- Training -------------------------------------------------------------------------------------
@pytest.mark.parametrize("amp", ["fp16", "bf16", "off"])
def test_every_precision_trains(few_shapes, amp):
    vit.SHAPE_COUNTS["train"] = 160
    assert cli(f"{SHAPES} --epochs 4 --amp {amp}") == 0
    checkpoint = vit.load_checkpoint("vit.pt")
    losses = [row["train_loss"] for row in checkpoint["history"]]
    assert losses[-1] < losses[0] - 0.3 and bool(checkpoint["scaler"]) == (amp == "fp16")

def test_the_way_through_the_command_line(few_shapes, capsys):
    assert cli(f"{SHAPES} --epochs 1", "train --resume vit.pt --epochs 2") == 0     # a run may grow longer
    lines = capsys.readouterr().out.splitlines()
    assert "64 training and 20 test images" in " ".join(lines) and "test accuracy" in lines[-4]
    assert vit.load_checkpoint("vit.pt")["epoch"] == 2 and size_of("vit.png")[0] > 500
    look = "viz --ckpt vit.pt --image test:7"
    assert cli(look) == 0 and capsys.readouterr().out.endswith("wrote test_7_attention.png\n")
    Image.new("RGB", (300, 200), "red").save("my cat.jpg")
    Image.new("L", (5, 9)).save("dot.png")
    assert cli(f"{look} --out again.png", f"{look} --target 'blue ring' --out blue.png",
               f"{look} --target 'red disc' --out red.png", "viz --ckpt vit.pt",
               "viz --ckpt vit.pt --image 'my cat.jpg' dot.png") == 0
    assert Path("again.png").read_bytes() == Path("test_7_attention.png").read_bytes()
    assert Path("blue.png").read_bytes() != Path("red.png").read_bytes()
    assert size_of("learnt.png") == (1600, 540) and Path("my cat_attention.png").exists()
    error = capsys.readouterr().err
    assert "dot.png is enlarged" in error and error.count("\n") == 1 and not list(few_shapes.glob("*.tmp"))

@pytest.mark.parametrize("size", [(1, 1), (32, 4000), (8000, 6000)])
def test_extreme_sizes_are_drawn(trained, tmp_path, capsys, size):
    Image.new("RGB", size, "teal").save(tmp_path / "image.jpg")
    assert cli(f"viz --ckpt '{trained}' --image '{tmp_path}/image.jpg' --out '{tmp_path}/out.png'") == 0
    assert size_of(tmp_path / "out.png") == (1600, 900)
    assert ("enlarged" in capsys.readouterr().err) == (size == (1, 1))

def test_a_cnn_in_the_same_loop(few_shapes, capsys):
    """torchvision's ResNet-18 but for its stem: trained, tested, and not to be drawn."""
    model, image = vit.make_model("resnet18", vit.ViTConfig(num_classes=7)), torch.zeros(1, 3, 32, 32)
    assert model(image).shape == (1, 7)
    assert model.layer1(model.maxpool(model.conv1(image))).shape[2:] == (32, 32)
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 993 * 513 - 64 * 3 * (49 - 9)
    assert cli(f"{SHAPES} --epochs 1 --model resnet18") == 0
    assert "in batches of 16, AdamW, seed" in capsys.readouterr().out
    assert cli("eval --ckpt vit.pt", "viz --ckpt vit.pt --image test:0") == 2

@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler")
def test_compiled_it_learns_the_same(few_shapes):
    """And its checkpoint is plain."""
    command, names = f"{SHAPES} --epochs 1 --amp off --out", ("plain.pt", "compiled.pt")
    assert cli(f"{command} plain.pt", f"{command} compiled.pt --compile",
               "viz --ckpt compiled.pt --image test:0") == 0
    plain, compiled = (vit.load_checkpoint(name)["history"][0]["test_loss"] for name in names)
    assert plain == pytest.approx(compiled, rel=1e-3)

def test_eval_counts(few_shapes, trained, monkeypatch, capsys):
    """Accuracy by class and mistakes, against a count by hand; the same figure as the log's."""
    vit.SHAPE_COUNTS["test"] = 10
    monkeypatch.setattr(vit, "pick_device", lambda name: CPU)
    assert cli(f"eval --ckpt '{trained}'") == 0
    accuracy = vit.load_checkpoint(trained)["history"][-1]["test_accuracy"]
    assert f"test accuracy {accuracy:.2%}" in capsys.readouterr().out
    vit.SHAPE_COUNTS["test"] = 20
    guesses = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 2, 3, 5, 5, 6, 1, 8, 1])
    monkeypatch.setattr(vit, "predict", lambda *args, **options: F.one_hot(guesses, 10).float())
    assert cli(f"eval --ckpt '{trained}'") == 0
    assert {"test accuracy 80.00% on 20 images of shapes", "   50.0%  red ring", "  100.0%  red disc",
            "       1  red ring taken for red disc"} <= set(capsys.readouterr().out.splitlines())

def test_evaluation_counts():
    """Accuracy and loss of a model whose logits are known: they are the pixels."""
    logits = torch.tensor([[9, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0.0]])
    pixels, labels = (logits[:, :, None, None] * 20).to(torch.uint8), torch.tensor([0, 1, 1, 2, 2])
    data = vit.Data(None, None, pixels, labels, list("abc"), torch.tensor(0.0), torch.tensor(20 / 255), False)
    loss, accuracy = vit.evaluate(torch.nn.Flatten(), data, torch.float32, 2)       # the last batch is short
    assert accuracy == pytest.approx(0.6)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)

def test_a_new_run_keeps_the_old_checkpoint(few_shapes, monkeypatch, capsys):
    """And the seed fixes what it learns."""
    command, path, old = f"{SHAPES} --epochs 1", Path("vit.pt"), [Path("vit.old.pt"), Path("vit.old2.pt")]
    assert cli(command) == 0
    contents = [path.read_bytes()]
    assert cli(command) == 0 and "vit.old.pt" in capsys.readouterr().out
    contents.append(path.read_bytes())
    with monkeypatch.context() as patch:                        # not moved for a run that saves nothing
        patch.setattr(vit, "train_epoch", interrupt)
        assert cli(command) == 130 and path.read_bytes() == contents[1] and not old[1].exists()
    assert cli(f"{command} --seed 4") == 0                      # and a third one keeps both
    assert [file.read_bytes() for file in old] == contents
    assert Path("vit.old2.csv").exists() and Path("vit.old2.png").exists()
    first, second, other = (vit.load_checkpoint(f)["model"]["blocks.0.mlp.fc1.weight"] for f in (*old, path))
    assert torch.equal(first, second) and not torch.equal(first, other)

def test_a_loss_that_is_not_finite_stops_the_run(few_shapes, monkeypatch, capsys):
    """Before the checkpoint is written, with the step and a suggestion."""
    monkeypatch.setattr(vit.ViT, "initialise", lambda self: self.head.bias.data.fill_(torch.nan))
    assert cli(f"{SHAPES} --epochs 1 --amp off") == 2
    error = capsys.readouterr().err
    assert re.search("loss is nan at step [0-3];", error) and "--lr" in error and not Path("vit.pt").exists()

def test_ctrl_c_leaves_the_last_checkpoint(few_shapes, monkeypatch, capsys):
    def last_line():
        return capsys.readouterr().out.splitlines()[-1]
    steps = iter([vit.train_epoch])
    monkeypatch.setattr(vit, "train_epoch", lambda *args: next(steps, interrupt)(*args))
    assert cli(f"{SHAPES} --epochs 3") == 130
    assert "train --resume vit.pt" in last_line() and vit.load_checkpoint("vit.pt")["epoch"] == 1
    assert cli("train --resume vit.pt --out other.pt") == 130                       # not saved yet
    assert "python vit.py train --resume vit.pt" in last_line()
    assert cli(f"{SHAPES} --out other.pt") == 130 and "nothing is saved yet" in last_line()

def test_weights_of_a_wrapped_model_are_accepted(trained, tmp_path):
    weights = torch.load(trained, weights_only=True)["model"]
    wrapped = {"module._orig_mod." + name: weight for name, weight in weights.items()}
    model = vit.restore_model(altered(trained, tmp_path / "x.pt", model=wrapped))[1]
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())

@pytest.mark.parametrize("part, value, says", [
    ("vit", {"dim": 64}, "size mismatch"), ("vit", {"depth": 256, "dim": 16384, "num_heads": 1}, "Missing key"),
    ("vit", {"dim": "32"}, ""), ("vit", {"width": 3}, ""), ("train", {"model": "resnet18"}, "Missing key"),
    ("model", {"tail": torch.zeros(1)}, "tail"), ("model", {"head.bias": torch.ones(10) / 0}, "finite"),
    ("format", 2, "format is 2"), ("format", None, "None"), ("epoch", 7, "fit together"),
    ("history", [{"epoch": 1}], "fit together"), ("mean", [0.5], "fit together"), ("classes", ["cat"], "fit together"),
    *[("optimizers", value, "optimizers do not fit") for value in
      ([], 3, [{}, {}], "of another shape")]])
def test_a_checkpoint_whose_parts_do_not_fit(few_shapes, trained, capsys, part, value, says):
    """Refused before a model is built, however large the sizes that it declares."""
    checkpoint = torch.load(trained, weights_only=True)
    adamw, muon = checkpoint["optimizers"]
    if isinstance(value, dict):
        value = checkpoint[part] | value
    elif value == "of another shape":
        adamw["state"][0] = {name: torch.zeros(3) for name in adamw["state"][0]}
        value = [adamw, muon]
    vit.SHAPE_COUNTS.update(train=32, test=10)
    altered(trained, "x.pt", **{part: value})
    assert cli("train --resume x.pt --epochs 2") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert part == "optimizers" or "x.pt is not a whole checkpoint" in error

class Payload:
    def __reduce__(self):
        return open, ("was-run", "w")

def test_a_damaged_checkpoint_is_refused_and_runs_no_code(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.load(altered(trained, "x.pt", classes=Payload()), weights_only=False)["classes"].close()
    Path("was-run").unlink()                            # so the payload is live
    whole, middle = trained.read_bytes(), trained.stat().st_size // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1:]
    for content in (Path("x.pt").read_bytes(), flipped, whole[:-100], b""):
        Path("x.pt").write_bytes(content)
        with pytest.raises(vit.InputError, match="not a whole" + ".*damaged" * (content == flipped)):
            vit.load_checkpoint("x.pt")
    assert not Path("was-run").exists()

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

def four_steps(weights, step):
    for n in range(4):
        for i, W in enumerate(weights):     # growing, so that the running mean matters
            W.grad = (n + 1) * random_images(*W.shape, seed=10 * n + i)
        step()
    return weights

MATRICES = [random_images(*shape) for shape in ((48, 16), (16, 48), (24, 24), (24, 24), (72, 24))]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

def test_muon_is_the_plain_loop():
    """Tall, wide, square, square in another group, and three stacked ones; and one at rest."""
    ours, plain, means = ([k * W for W in MATRICES] for k in (1, 1, 0))
    options, idle = [(0.1, 0.5, 1)] * 3 + [(0.03, 0.0, 1), (0.1, 0.5, 3)], torch.ones(24, 24)
    muon = vit.Muon([{"params": [W], "lr": lr, "weight_decay": decay, "chunks": [parts]}
                     for W, (lr, decay, parts) in zip([*ours, idle], [*options, options[0]])])
    four_steps(plain, lambda: [plain_muon(W, W.grad, mean, *option)
                               for W, mean, option in zip(plain, means, options)])
    for a, b in zip(four_steps(ours, muon.step), plain):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert torch.equal(idle, torch.ones(24, 24))

@pytest.mark.skipif(not getattr(torch.optim, "Muon", None), reason="this PyTorch has no Muon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_pytorchs(dtype):
    """That one's products are in bf16: they agree to 2 % of the way that a matrix has gone."""
    ours, theirs = ([W.clone() for W in MATRICES] for _ in range(2))
    muon = vit.Muon([{"params": ours, "chunks": [1] * len(ours)}], lr=0.1, weight_decay=0.5, dtype=dtype)
    twin = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.5)
    for a, b, W in zip(four_steps(ours, muon.step), four_steps(theirs, twin.step), MATRICES):
        assert (a - b).norm() < 2e-2 * (b - W).norm()
        torch.testing.assert_close(muon.state[a], twin.state[b])        # old checkpoints go on

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
    run = vit.Run(model.config, model, vit.make_optimizers(model, config),
                  torch.amp.GradScaler("cpu", enabled=False), [None])
    loss, accuracy, _ = vit.train_epoch(run, data, config, torch.float32)
    weights, right, losses, lengths = dict(plain.named_parameters()), [], [], []
    matrices = {name: torch.zeros_like(p) for name, p in weights.items()        # running means
                if name.startswith("blocks.") and p.ndim == 2}
    adamw = torch.optim.AdamW([
        {"params": p, "weight_decay": 0.4 * (name in ("patch_embed.proj.weight", "head.weight"))}
        for name, p in weights.items() if name not in matrices])
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
        for name, mean in matrices.items():
            plain_muon(weights[name].data, weights[name].grad, mean, 0.05 * share, 0.4,
                       3 if "qkv" in name else 1)
    assert min(lengths) > 0.5 and max(lengths) > 1.2 * min(lengths)     # all clipped, not alike
    assert (loss, accuracy) == pytest.approx((sum(losses).item() / 4, sum(right).item() / 4), 1e-4)
    for (name, p), before in zip(model.named_parameters(), start.parameters()):
        off, way = p - weights[name], weights[name] - before
        off[32:64] *= "qkv.bias" not in name    # softmax ignores that of k: its gradient is noise
        assert off.norm() < 2e-3 * way.norm(), name

def test_predict_in_batches_keeps_the_order():
    model, images, sizes = random_model(dropout=0.5).train(), noise_data().images[:23], []
    model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    logits = vit.predict(model, images, 0.5, 0.25, torch.float32, 5)
    assert sizes == [5, 5, 5, 5, 3] and logits.std(0).min() > 1e-3
    torch.testing.assert_close(logits, model.eval()(vit.normalise(images, 0.5, 0.25)))

@pytest.mark.parametrize("fused", [False, True])
def test_dropout_acts_on_the_weights_of_attention(fused):
    attn, x = random_model(dropout=0.5).blocks[0].attn, random_images(1, 9, 32)
    expected = attn(x)[0]
    torch.testing.assert_close(attn(x, fused=fused)[0], expected, atol=1e-5, rtol=1e-5)
    torch.manual_seed(0)
    out = attn.train()(x.expand(4000, -1, -1), fused=fused)[0]
    assert ((out.mean(0) - expected[0]).abs() < 6 * out.std(0) / 4000**0.5).all()
    assert (out / 2 - expected)[out != 0].std() > 0.1 * expected.std()  # not the last one alone

@gpu
@pytest.mark.parametrize("extra", ["--amp=fp16", "--amp=bf16", "--compile"])
def test_cuda_trains(few_shapes, extra):
    assert cli(f"{SHAPES} --epochs 9 --device cuda {extra}") == 0
    losses = [row["train_loss"] for row in vit.load_checkpoint("vit.pt")["history"]]
    assert losses[-1] < losses[0] - 0.3

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
    torch.testing.assert_close(seen[0], seen[1].cpu(), atol=0.1, rtol=0.1)
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)

def test_matrices_of_blocks_are_found_under_any_name():
    model = random_model()
    coder = {"encoder": model.blocks[0], "decoder": model.blocks[1], "out": torch.nn.Linear(32, 48)}
    models = model, torch.nn.Sequential(model), torch.nn.ModuleDict(coder)
    plain, wrapped, other = ([set(map(id, g)) for g in vit.parameter_groups(m)] for m in models)
    assert len(plain[0]) == 8 and len(plain[1]) == 2 and wrapped == plain
    assert other[0] == plain[0] and len(other[1]) == 1

@pytest.mark.parametrize("dtype, training", [(torch.bfloat16, True), (torch.float16, False)])
def test_relevance_in_half_precision_and_in_failure(dtype, training):
    model, half = random_model().train(training), random_model().to(dtype).train(training)
    exact, result, rounded = (vit.relevance(m, random_images(2, 3, 16, 16), 3)
                              for m in (model, half, random_model().to(dtype).float()))
    assert result.dtype == torch.float32 != half.head.weight.dtype
    torch.testing.assert_close(result, rounded)
    assert (result - exact).norm() < 0.1 * exact.norm()
    for one, size, target in ((model, 16, 99), (half, 16, 99), (model, 17, 3), (half, 17, 3)):
        with pytest.raises((RuntimeError, ValueError)):     # no such class; no whole patches
            vit.relevance(one, random_images(2, 3, size, size), target)
        assert all(module.training == training for module in one.modules())

def test_positions_for_a_smaller_grid():
    model = random_model(image_size=32)                     # 8 x 8 patches
    table = model.pos_embed[0, 1:].T.reshape(1, 32, 8, 8)
    small = F.interpolate(table, (3, 5), mode="bicubic", antialias=True)[0].reshape(32, 15).T
    torch.testing.assert_close(model.positions(3, 5)[0, 1:], small)

# ---- Seeing ---------------------------------------------------------------------------------------
def one_head(matrix):
    return torch.tensor(matrix, dtype=torch.float)[None, None]

def test_rollout_of_two_blocks_by_hand():
    """Block 1: both patches look at patch 2. Block 2: the class token looks at patch 1."""
    A1, A2 = one_head([[1, 0, 0], [0, 0, 1], [0, 0, 1]]), one_head([[0, 1, 0], [0, 1, 0], [0, 0, 1]])
    R = vit.rollout_matrix([A1, A2])
    assert_close(R[0, 0], torch.tensor([0.5, 0.25, 0.25]))
    assert_close(R.sum(-1), torch.ones(1, 3))
    assert_close(vit.attention_rollout([A1, A2]), torch.tensor([[0.25, 0.25]]))
    heads = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert_close(vit.rollout_matrix([heads]), vit.rollout_matrix([heads.mean(1, keepdim=True)]))
    even = vit.rollout_matrix([torch.full((1, 3, 65, 65), 1 / 65)] * 6)[0, 0]       # it stays flat
    assert_close(even, torch.tensor([0.0307692] + [0.0151442] * 64), atol=1e-6, rtol=0)
    assert_close(vit.times_uniform(even[1:]), torch.ones(64))
    assert torch.equal(vit.times_uniform(torch.zeros(2, 9)), torch.zeros(2, 9))     # and zeros stay zeros

def test_relevance_by_hand():
    A1 = one_head([[0.1, 0.3, 0.6], [0, 0, 0.4], [0, 0, 0]])
    A2 = one_head([[0, 0.6, 0], [0, 0, 0], [0, 0, 0]])
    R = vit.relevance_matrix([A1, A2], [torch.ones(1, 1, 3, 3)] * 2)
    assert_close(R[0, 0], torch.tensor([1.1, 0.9, 0.84]))
    A, G = torch.zeros(2, 1, 2, 3, 3)                           # two heads: cut off before the mean
    A[0, 0, 0], A[0, 1, 0] = torch.tensor([0.2, 0.6, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    G[0, 0, 0], G[0, 1, 0] = torch.tensor([0.0, 1, -5]), torch.tensor([1.0, -1, 2])
    assert_close(vit.relevance_matrix([A], [G])[0, 0], torch.tensor([1.1, 0.3, 0.6]))

def test_relevance_of_a_model():
    """Each gradient meets its block's weights; images do not mix, targets may differ, the mode is kept,
    frozen weights are no obstacle."""
    model, images = random_model(depth=3).train(), random_images(3, 3, 16, 16)
    logits, attention = model(images, return_attention=True)
    G = torch.autograd.grad(logits[1, 2], attention)
    alone = vit.relevance(model.requires_grad_(False), images[1:2], 2)
    assert_close(alone, vit.relevance_matrix(attention, G)[1:2, 0, 1:], atol=1e-5, rtol=1e-4)
    together = vit.relevance(model, images, torch.tensor([1, 2, 3]))
    assert together.shape == (3, 16) and model.training and not together.requires_grad
    assert_close(together[1:2], alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(alone, vit.relevance(model, images[1:2], 5))

def test_attention_distance():
    up = torch.eye(7)                                           # on a grid of 3 x 2, each looks up
    up[3:] = torch.eye(7)[1:5]
    for A, grid, expected in ((torch.full((65, 65), 1 / 65), (8, 8), 16.5459), (up, (3, 2), 4 * 4 / 6),
                              (torch.full((5, 5), 0.2), (2, 2), 3.41421), (torch.eye(5), (2, 2), 0.0)):
        distance = vit.attention_distance([A.expand(2, 3, *A.shape)] * 2, grid, 4)
        assert_close(distance, torch.full((2, 3), expected), atol=1e-4, rtol=0)

def mass_and_pointing(maps, masks, patch_size):
    """Mass of (n, N-1) maps in the masks (n, S, S), over the masks' share; rate of peaks that touch."""
    share = F.avg_pool2d(masks[:, None].float(), patch_size).flatten(1)             # (n, N-1)
    mass = (maps / maps.sum(1, keepdim=True) * share).sum(1) / share.mean(1)
    return mass.mean().item(), (share.gather(1, maps.argmax(1, keepdim=True)) > 0).float().mean().item()

def test_maps_find_the_object(few_shapes):
    """A model trained for seconds looks at the coloured figure: far more than an untrained one, or
    than a blob in the middle would. (The mass would be 1 by chance.)"""
    vit.SHAPE_COUNTS["train"] = 1600
    assert cli(f"{SHAPES} --epochs 5 --image-size 32 --dim 64 --depth 3") == 0
    checkpoint, model, mean, std = vit.restore_model("vit.pt")
    images, _, masks = vit.make_shapes(200, 32, seed=1)
    x, results = vit.normalise(images, mean, std), {}
    torch.manual_seed(0)
    for name, net in (("trained", model), ("untrained", vit.ViT(checkpoint["vit"]).eval())):
        logits, attention = net(x, return_attention=True)
        maps = vit.relevance(net, x, logits.argmax(1))
        results[name, "cls"] = mass_and_pointing(attention[-1].mean(1)[:, 0, 1:], masks, 4)
        results[name, "relevance"] = mass_and_pointing(maps + 1e-12, masks, 4)
    middle = torch.exp(-((torch.arange(8) - 3.5) ** 2) / 8)
    blob = mass_and_pointing(torch.outer(middle, middle).flatten().expand(200, -1), masks, 4)
    for name, least in (("cls", 0.65), ("relevance", 0.85)):        # seeds 0 to 3: 0.74 to 1, 0.96 to 1
        mass, pointing = results["trained", name]
        assert mass > 1.5 * blob[0] and mass > 2 * results["untrained", name][0], results
        assert pointing > least > blob[1] + 0.1, results

def test_a_map_of_zeros_and_odd_sizes_can_be_drawn(tmp_path):
    """Weights of zero: uniform attention, relevance all zero. Also one head, and many blocks."""
    model, photo = random_model(depth=9, num_heads=1, num_classes=3), Image.new("RGB", (90, 30), "red")
    model.load_state_dict({name: torch.zeros_like(weight) for name, weight in model.state_dict().items()})
    vit.draw_picture(tmp_path / "p.png", photo, vit.center_crop(photo, 16), model, torch.zeros(3, 1, 1),
                     torch.ones(3, 1, 1), ["a", "b $x", "c" * 99])
    assert size_of(tmp_path / "p.png") == (1600, 900)

def test_what_counts_as_an_image(tmp_path, capsys):
    """Suffixes that torchvision does not know; hidden entries, notes and circles; NFC names."""
    folder, image = tmp_path / "pets", Image.new("RGB", (8, 8), "teal")
    for name in ("cat", "cafe\u0301", ".ipynb_checkpoints", "__MACOSX"):
        (folder / name).mkdir(parents=True)
    (folder / "caf\u00e9").mkdir(exist_ok=True)                 # another folder, unless on macOS
    image.save(folder / "caf\u00e9/0.png")
    image.save(folder / "cafe\u0301/1.png")
    for kind, suffix in (("JPEG", "jfif"), ("GIF", "gif"), ("TGA", "tga"), ("JPEG2000", "jp2"), ("ICO", "ico")):
        image.save(folder / f"cat/{suffix}.{suffix}", format=kind)
    for name in ("cat/._0.jpg", ".ipynb_checkpoints/0.png", "cat/notes.txt", "cat/Thumbs.db", "cat/a.pdf"):
        (folder / name).write_text("no image")
    (folder / "cat/up").symlink_to(folder, target_is_directory=True)
    classes = vit.list_classes(folder)
    assert list(classes) == ["caf\u00e9", "cat"] and [len(files) for files in classes.values()] == [2, 5]
    assert "opened: 3 (.db, .pdf, .txt)" in capsys.readouterr().out
    images, _ = vit.decode([(file, 0) for file in classes["cat"]], 8, "cpu")
    assert (images.float().mean((0, 2, 3)) - torch.tensor([0, 128, 128])).abs().max() < 3

def test_a_folder_of_classes_alone_is_split(tmp_path, capsys):
    make_folder(tmp_path, splits=("",))
    train, test, both = (vit.open_folder(tmp_path, split) for split in ("train", "test", "any"))
    assert [file.name for file in test["cat"]] == ["0.png", "5.png"]
    assert not set(train["cat"]) & set(test["cat"]) and sorted(train["cat"] + test["cat"]) == both["cat"]
    assert capsys.readouterr().out.count("every fifth") == 1
    make_folder(tmp_path / "parts", splits=("Train", "valid"))
    (tmp_path / "parts/test").mkdir()
    (tmp_path / "parts/test/0.png").touch()                     # an unlabelled test folder
    assert len(vit.open_folder(tmp_path / "parts", "train")["dog"]) == 8
    assert "valid" in str(vit.open_folder(tmp_path / "parts", "test")["dog"][0])
    assert "no class folders" in capsys.readouterr().out

def test_grey_of_twelve_bits(tmp_path):
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    for scale in (1, 16):
        Image.fromarray(ramp * scale).save(tmp_path / "x.png")
        values = np.asarray(vit.open_image(tmp_path / "x.png"))[..., 0].flatten()
        assert len(set(values)) == 256 and (np.diff(values.astype(int)) >= 0).all() and values[-1] >= 254

def test_unreadable_images_are_all_named(tmp_path):
    make_folder(tmp_path)
    for i in (1, 3):
        (tmp_path / f"train/dog/{i}.png").write_bytes(b"no image")
    with pytest.raises(vit.InputError, match="2 of 16 files.*dog/1.png.*dog/3.png"):
        vit.load_data(vit.TrainConfig(data=str(tmp_path), batch_size=2), 16, torch.device("cpu"))

def test_eval_on_some_of_the_classes(trained, tmp_path, capsys):
    images, labels, _ = vit.make_shapes(20, 16, seed=1)
    for i in (0, 1, 11):                                        # red disc and red ring only
        folder = tmp_path / vit.SHAPE_CLASSES[labels[i]]
        folder.mkdir(exist_ok=True)
        Image.fromarray(images[i].permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    command = f"eval --ckpt {trained} --data {tmp_path} --device cpu"
    assert cli(command) == 0
    out = capsys.readouterr().out
    assert "on 3 images" in out and "red ring" in out and "blue disc" not in out.split("mistakes")[0]
    (tmp_path / "cow").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "cow/0.png")
    assert cli(command) == 2 and "cow" in capsys.readouterr().err

def test_many_pictures_in_one_call(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a/1.jpg", "b/1.jpg"):
        Path(name).parent.mkdir()
        Image.new("RGB", (40, 40), "red").save(name)
    Path("bad.png").write_text("no image")
    assert cli(f"viz --ckpt {trained} --image a/1.jpg bad.png b/1.jpg") == 2
    out, error = capsys.readouterr()
    assert error.count("\n") == 1 and "bad.png" in error
    assert re.search(r"a/1.jpg: (red|green|blue|yellow|purple) \w+ \d+\.\d %, ".replace(" %", "%"), out)
    pictures = sorted(path.name for path in Path().glob("*_attention.png"))
    assert pictures == ["1_2_attention.png", "1_attention.png"]
    Image.new("RGB", (40, 40)).save("cat.png")
    for _ in range(2):                                          # as `--image *.png` would
        names = sorted(str(path) for path in Path().glob("cat*.png"))
        assert vit.main(["viz", "--ckpt", str(trained), "--image", *names]) == 0
    assert not Path("cat_attention_attention.png").exists() and "passed over" in capsys.readouterr().err
    Path("there").mkdir()
    assert cli(f"viz --ckpt {trained} --image a/1.jpg test:1 --out there") == 0
    assert {path.name for path in Path("there").iterdir()} == {"1_attention.png", "test_1_attention.png"}
    os.link("cat.png", "hard.png")                              # the same photograph under another name
    before = Path("cat.png").read_bytes()
    assert cli(f"viz --ckpt {trained} --image cat.png --out hard.png") == 2 and before == Path("cat.png").read_bytes()

def test_two_runs_into_one_file_keep_both_models(few_shapes, monkeypatch, capsys):
    real, done = vit.train_epoch, []
    def meanwhile(*args):
        if not done:
            done.append(1)
            assert cli(f"{SHAPES} --epochs 1 --seed 7") == 0
        return real(*args)
    monkeypatch.setattr(vit, "train_epoch", meanwhile)
    assert cli(f"{SHAPES} --epochs 2") == 0
    assert "goes on as vit.new.pt" in capsys.readouterr().out
    assert [vit.load_checkpoint(name)["train"].seed for name in ("vit.pt", "vit.new.pt")] == [7, 0]
    assert vit.load_checkpoint("vit.new.pt")["epoch"] == 2

def test_files_beside_a_new_checkpoint_are_kept(few_shapes):
    for name in ("cat.png", "cat.csv"):
        Path(name).write_text("mine")
    assert cli(f"{SHAPES} --epochs 1 --out cat.pt") == 0
    assert Path("cat.old.png").read_text() == Path("cat.old.csv").read_text() == "mine"

def test_a_log_that_cannot_be_written_ends_no_run(few_shapes, capsys):
    for name in ("vit.csv", "vit.png"):
        Path(name).mkdir(parents=True)
    assert cli(f"{SHAPES} --epochs 1") == 0
    assert "vit.csv could not be written" in capsys.readouterr().out and vit.load_checkpoint("vit.pt")["epoch"] == 1

@on_linux
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_time_limit_ends_a_run_as_ctrl_c_does(tmp_path, name):
    command = [sys.executable, HERE / "vit.py", *SHAPES.split(), "--epochs", "10000"]
    process = subprocess.Popen(command, text=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"OMP_NUM_THREADS": "1"},
                               preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL))
    while not (tmp_path / "vit.png").exists():      # the last file of a save: the next epoch begins
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    out, error = process.communicate()
    assert (process.returncode, error) == (130, "") and "--resume vit.pt" in out.splitlines()[-1]
    assert vit.load_checkpoint(tmp_path / "vit.pt")["epoch"] >= 1

def test_tokens_that_are_too_few_or_too_many(few_shapes, monkeypatch, capsys):
    monkeypatch.setattr(vit, "train", interrupt)
    for size, patch, says in ((32, 16, "--patch-size 4"), (224, 4, "--patch-size 16"), (32, 4, "")):
        assert cli(f"{SHAPES} --image-size {size} --patch-size {patch}") == 130
        out = capsys.readouterr().out
        assert ("warning" in out) == bool(says) and says in out

# ---- The command line -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def workshop(tmp_path_factory, trained):
    """A folder with a small checkpoint and files that are wrong in one way each."""
    root = tmp_path_factory.mktemp("workshop")
    for name in ("good", "hollow", "broken"):
        make_folder(root / name)
    make_folder(root / "flat", splits=("photos",))
    make_folder(root / "lonely", classes=("cat",))
    make_folder(root / "odd", splits=("train",))
    make_folder(root / "odd", splits=("test",), classes=("cat", "cow"))
    for folder in ("hollow/train/bird", "bare/train", "bare/test"):
        (root / folder).mkdir(parents=True)
    Image.effect_noise((99, 99), 80).save(root / "whole.jpg")
    (root / "cut.jpg").write_bytes((root / "whole.jpg").read_bytes()[:2000])
    for name, content in (("vit.pt", trained.read_bytes()), ("text.png", b"hello"), ("empty.png", b""),
                          ("file", b""), ("broken/train/dog/3.png", b"not an image")):
        (root / name).write_bytes(content)
    Image.new("F", (9, 9), 0.5).save(root / "float.tif")
    train, cnn = torch.load(trained, weights_only=True)["train"], vit.make_model("resnet18", vit.ViTConfig())
    altered(trained, root / "longer.pt", train=train | {"epochs": 3})
    altered(trained, root / "cnn.pt", train=train | {"model": "resnet18"}, model=cnn.state_dict())
    return root

BAD = {     # the beginning of a command: how it goes on, and what the sentence names
    "": [("", "train"), ("fly", "fly"), ("eval", "--ckpt")],
    "train ": [("--epoch 3", "--epoch"), ("--epochs many", "many"), ("--epochs 0", "--epochs"),
        ("--epochs -3", "-3"), ("--batch-size 0", "--batch-size"), ("--lr nan", "--lr"),
        ("--muon-lr inf", "--muon-lr"), ("--warmup 1.5", "--warmup"), ("--seed -1", "--seed"),
        ("--optimizer sgd", "sgd"), ("--amp fp8", "fp8"), ("--image-size 30", "--patch-size 4"),
        ("--dim 100", "--num-heads 3"), ("--variant XXL", "XXL"), ("--mlp-ratio 0.1 --dim 9", "--mlp-ratio"),
        ("--model cnn", "cnn"), ("--label-smoothing 1", "--label"), ("--device cuda", "--device cuda"),
        ("--out no/where.pt", "no/where.pt"), ("--out file/x.pt", "file"), ("--out good", "good"),
        (f"--out {'x' * 300}.pt", "too long"), ("--out vit.pt/", "vit.pt/")],
    "train --data ": [("nowhere", "nowhere"), ("flat", "train/CLASS"), ("bare", "bare/train"),
        ("good", "--batch-size 128"), ("lonely --batch-size 2", "one class"), ("odd --batch-size 2", "cow"),
        ("hollow", "bird"), ("broken --batch-size 2", "broken/train/dog/3.png"),
        ("shapes --image-size 512", "256"), ("good --batch-size 2 --image-size 4096 --patch-size 64", "GiB")],
    "train --resume ": [("missing.pt", "missing.pt"), ("text.png", "text.png"), ("''", "checkpoint"),
        ("vit.pt", "--epochs"), ("vit.pt --epochs 3 --seed 4 --dim 64", "--dim is 32, --seed is 0;"),
        ("vit.pt --epochs 3 --data good", "--data"), ("longer.pt --epochs 1", "cannot be made shorter")],
    "eval --ckpt ": [("missing.pt", "missing.pt"), ("vit.pt --data good", "good"),
        ("vit.pt --data nowhere", "nowhere")],
    "viz --ckpt ": [("cnn.pt --image whole.jpg", "no attention to draw"),
        ("missing.pt --image test:0", "missing.pt"), ("good --image test:0", "good"),
        ("text.png --image whole.jpg", "text.png"), ("vit.pt --out x.pdf", "x.pdf"),
        ("vit.pt --target cow", "cow"), ("vit.pt --target 'red disc'", "--image")],
    "viz --ckpt vit.pt --image ": [("float.tif", "grey"), ("test:1 --data nowhere", "nowhere"),
        ("missing.png", "missing.png"), ("''", "image"), ("text.png", "text.png"), ("empty.png", "empty.png"),
        ("cut.jpg", "cut.jpg"), ("good", "good"), ("test:10", "test:9"), ("test:-1", "test:-1"),
        (f"{'x' * 300}.png", "too long"), ("test:0 --out x.png/", "x.png/"),
        ("text.png --out text.png", "same")],
    "viz --ckpt vit.pt --image whole.jpg ": [("--out no/x.png", "no/x.png"), ("--out file/x.png", "file"),
        ("--out x.jpg", "x.jpg"), ("--out whole.png/..", "--out"), ("text.png --out x.png", "--out")]}

@pytest.mark.parametrize("command, names", [(start + go, says) for start in BAD for go, says in BAD[start]])
def test_bad_input_gets_one_sentence(workshop, monkeypatch, capsys, command, names):
    monkeypatch.chdir(workshop)
    monkeypatch.setattr(vit, "SHAPE_COUNTS", {"train": 32, "test": 10})
    monkeypatch.setattr(vit, "MOST_BYTES", 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vit, "train_epoch", lambda *args: pytest.fail("training began"))
    files = {path: path.stat().st_mtime_ns for path in workshop.rglob("*")}
    assert cli(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("vit.py: ") and error.count("\n") == 1 and names in error
    assert {path: path.stat().st_mtime_ns for path in workshop.rglob("*")} == files

def small_process(command, before="", at_save=0, do="", **options):
    """Start `python vit.py` on a few shapes, with lines of Python run first, and before a save."""
    code = ("import os, resource, signal, sys, torch, vit; torch.set_num_threads(1)\n"
            "vit.SHAPE_COUNTS.update(train=160, test=20)\nsaves, save = [], torch.save\n"
            f"def spy(*args):\n    saves.append(1)\n    if len(saves) == {at_save}:\n        {do or 'pass'}\n"
            f"    save(*args)\ntorch.save = spy\n{before}\nsys.exit(vit.main(sys.argv[1:]))")
    return subprocess.Popen([sys.executable, "-c", code, *command.split()], text=True,
                            env={**os.environ, "PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""},
                            **{"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, **options})

def sentence_of(process):
    """The one sentence with which a process gave up."""
    error = process.communicate()[1]
    assert process.returncode == 2 and error.startswith("vit.py: ") and error.count("\n") == 1
    return error

@on_linux
def test_a_standard_output_that_takes_nothing(tmp_path):
    """A full disk, a reader that has gone, none at all: the run goes on, and a note says so."""
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full, os.fdopen(write, "w") as gone:
        started = [small_process(f"{SHAPES} --epochs 1 --out {n}.pt", cwd=tmp_path, stdout=out)
                   for n, out in enumerate((full, gone))]
        quiet = small_process(f"{SHAPES} --epochs 1", "import os; os.close(1); sys.stdout = None", cwd=tmp_path)
        for process in started:
            error = process.communicate()[1]
            assert process.returncode == 0 and "cannot be written" in error and error.count("\n") == 1
    assert quiet.communicate()[1] == "" and quiet.returncode == 0
    assert len(list(tmp_path.iterdir())) == 9                  # three runs, all saved

@on_linux
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """A limit on the size of a file stands for it; it comes after the first epoch."""
    process = small_process(f"{SHAPES} --epochs 3", "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)", 2,
                            "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))", cwd=tmp_path)
    assert "vit.pt could not be written" in sentence_of(process)
    assert vit.load_checkpoint(tmp_path / "vit.pt")["epoch"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"vit.pt", "vit.csv", "vit.png"}

@on_linux
def test_a_full_memory_says_so(tmp_path):
    limit = ("used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
             "resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 10**8,) * 2)")
    large = f"{SHAPES} --epochs 1 --image-size 64 --patch-size 2 --batch-size 160"
    assert "smaller --batch-size" in sentence_of(small_process(large, limit, cwd=tmp_path))

@on_linux
def test_a_killed_run_resumes_exactly(tmp_path):
    """Killed when a checkpoint is half written; with shuffle, policy, mixing, dropout, both optimizers
    and the scaler: the last whole one is there, and it goes on bit for bit as if nothing had happened."""
    command, same = f"{SHAPES} --epochs 4 --dropout 0.1 --drop-path 0.1 --amp fp16", dict(atol=0, rtol=0)
    mixed = ("real, vit.augment_strength = vit.load_data, lambda epochs: 0.5\n"
             "def load_data(*args):\n    data = real(*args)\n    data.augmented = True\n    return data\n"
             "vit.load_data = load_data")
    kill = ("vit.Path.write_bytes = lambda path, content: "
            "(open(path, 'wb').write(content[:9999]), os.kill(os.getpid(), signal.SIGKILL))")
    whole = small_process(f"{command} --out whole.pt", mixed, cwd=tmp_path)         # both at once
    cut = small_process(f"{command} --out cut.pt", mixed, 3, kill, cwd=tmp_path)
    assert (cut.communicate()[1], cut.returncode) == ("", -9)
    assert vit.load_checkpoint(tmp_path / "cut.pt")["epoch"] == 2
    resumed = small_process("train --resume cut.pt", mixed, cwd=tmp_path)
    for process in (whole, resumed):
        assert (process.communicate()[1], process.returncode) == ("", 0)
    whole, cut = (vit.load_checkpoint(tmp_path / name) for name in ("whole.pt", "cut.pt"))
    assert whole["epoch"] == cut["epoch"] == 4 and whole["scaler"] == cut["scaler"] != {}
    assert_close(cut["model"], whole["model"], **same)
    assert_close([o["state"] for o in cut["optimizers"]], [o["state"] for o in whole["optimizers"]], **same)
    for a, b in zip(whole["history"], cut["history"], strict=True):
        assert all(a[key] == b[key] for key in vit.LOG if "second" not in key)
    rows = list(csv.DictReader((tmp_path / "cut.csv").read_text().splitlines()))    # the log goes on as well
    assert [{key: float(value) for key, value in row.items()} for row in rows] == cut["history"]

def test_help_and_version(capsys):
    assert cli("--version") == 0 and vit.__version__ in capsys.readouterr().out
    assert cli("train --help") == 0
    text = capsys.readouterr().out
    assert "\ntraining:\n" in text and "\nmodel:\n" in text
    assert "--num-heads" in text and "(default: 0.006)" in text and "--num-classes" not in text

def test_a_variant_sets_the_size_and_what_is_typed_wins(monkeypatch):
    made = []
    monkeypatch.setattr(vit, "prepare", lambda *args: made.extend(args) or interrupt())
    assert cli("train --variant S/16 --depth 3 --patch-size 8") == 130
    assert vit.ViTConfig(dim=384, depth=3, num_heads=6, patch_size=8) in made

# ---- The texts ------------------------------------------------------------------------------------
def test_the_commands_of_the_readme_and_the_docstring_parse():
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    lines = [part.strip() for line in lines for part in line.split("&&")]
    lines += [line.strip().split("   ")[0] for line in vit.__doc__.splitlines()]
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("python vit.py")]
    assert {command[0] for command in commands} >= {"train", "viz"} and len(commands) > 8
    for command in commands:
        vit.make_parser().parse_args(command)

def test_the_readme_shows_what_exists(capsys):
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)|src=\"([^\"]+)\"", README):
        assert (HERE / (target[0] or target[1])).is_file(), target
    assert cli("train --help", "viz --help", "--help") == 0
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= set(re.findall("--[a-z-]+", capsys.readouterr().out))

def test_the_library_example_of_the_readme_runs(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    Image.new("RGB", (50, 40), "teal").save("cat.png")
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], names)
    assert names["logits"].shape == (1, 10)
    assert names["rollout"].shape == names["relevance"].shape == (1, math.prod(names["model"].grid))

def test_the_file_keeps_to_its_size():
    assert max(map(len, SOURCE.splitlines())) <= 100
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name
