"""Vision and audio networks of the zoo, from the `transformers` package, and a U-Net."""

# mypy: allow-subclassing-any
# To mypy, modules of PyTorch are of any type.

import itertools

import torch
import transformers
from _zoo import BATCH, CLASSES, TOKENS, VOCAB, WIDTH, Network, ids, images, tokens, vision
from torch import nn


def vit(layers: int) -> Network:
    """The vision transformer (Dosovitskiy et al. 2021) on images of 32×32 in 16 patches."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * WIDTH, image_size=32, patch_size=8, num_labels=CLASSES,
    )  # fmt: skip
    return vision(transformers.ViTForImageClassification(config), 32)


def vit_mae(layers: int) -> Network:
    """The masked autoencoder (He et al. 2022); the noise that draws the mask is an input.

    Its loss is an output. The positions are parameters that require no gradient.
    """
    config = transformers.ViTMAEConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * WIDTH, image_size=32, patch_size=8, decoder_num_attention_heads=2,
        decoder_hidden_size=16, decoder_num_hidden_layers=layers, decoder_intermediate_size=64,
    )  # fmt: skip
    inputs, dims = images(32)
    inputs["noise"] = torch.zeros(BATCH, 16)
    dims["noise"] = {0: "batch"}
    module = transformers.ViTMAEForPreTraining(config)
    return Network(module, inputs, dims, outputs=("loss", "logits"), loss="output:loss")


def swin(layers: int) -> Network:
    """Swin (Liu et al. 2021): windows of 4×4, every second layer's shifted, on images of 64×64."""
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        drop_path_rate=0.0, num_labels=CLASSES,
        attn_implementation="eager",  # PyTorch 2.13 cannot export the other form with a bias
    )  # fmt: skip
    return vision(transformers.SwinForImageClassification(config), 64)


class _Pixels(nn.Module):
    """A network with logits for each pixel; the classes are the last dim."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(pixel_values).logits
        return logits.flatten(2).transpose(1, 2)


def segformer(layers: int) -> Network:
    """SegFormer (Xie et al. 2021): a class for each of 16×16 pixels of images of 64×64."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[2, 2], sr_ratios=[4, 2], hidden_sizes=[16, WIDTH],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
        drop_path_rate=0.0, decoder_hidden_size=WIDTH, num_labels=CLASSES,
    )  # fmt: skip
    return vision(_Pixels(transformers.SegformerForSemanticSegmentation(config)), 64)


def resnet50(layers: int) -> Network:
    """ResNet-50 (He et al. 2016), with an eighth of every width, on images of 128×128.

    The maps of the last stage are 4×4. The last norm of each block begins with a small scale (Goyal
    et al. 2017 begin with 0). Otherwise fifty layers that each divide by the deviation of a few
    random numbers amplify rounding until losses in 32 bits cannot be compared.
    """
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3],
        layer_type="bottleneck", num_labels=CLASSES,
    )  # fmt: skip
    module = transformers.ResNetForImageClassification(config)
    for name, parameter in module.named_parameters():
        if name.endswith("layer.2.normalization.weight"):
            nn.init.constant_(parameter, 0.2)
    return vision(module, 128)


def efficientnet(layers: int) -> Network:
    """EfficientNet (Tan and Le 2019): three inverted bottlenecks with squeeze and excitation."""
    config = transformers.EfficientNetConfig(
        image_size=32, width_coefficient=0.5, depth_coefficient=1.0, depth_divisor=4,
        kernel_sizes=[3, 3, 5], in_channels=[32, 16, 32], out_channels=[16, 32, 48],
        depthwise_padding=[], strides=[1, 2, 2], num_block_repeats=[1, 2, 1],
        expand_ratios=[1, 4, 4], squeeze_expansion_ratio=0.25, hidden_dim=640, dropout_rate=0.0,
        drop_connect_rate=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return vision(transformers.EfficientNetForImageClassification(config), 32)


def convnext(layers: int) -> Network:
    """ConvNeXt (Liu et al. 2022) on images of 64×64."""
    config = transformers.ConvNextConfig(
        hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 3, 2], image_size=64, num_labels=CLASSES,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    return vision(transformers.ConvNextForImageClassification(config), 64)


def convnextv2(layers: int) -> Network:
    """ConvNeXt-V2 (Woo et al. 2023): norms of the response of all pixels, on images of 64×64."""
    config = transformers.ConvNextV2Config(
        hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], image_size=64, num_labels=CLASSES,
    )  # fmt: skip
    return vision(transformers.ConvNextV2ForImageClassification(config), 64)


class _Upward(nn.Module):
    """Two convolutions with norms of groups, as on each level of a U-Net."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm1(self.conv1(x)))
        return nn.functional.silu(self.norm2(self.conv2(x)))


class _UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = _Upward(3, widths[0])
        self.down = nn.ModuleList(_Upward(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(_Upward(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.first(pixel_values)
        skipped = []
        for level in self.down:
            skipped.append(x)
            x = level(nn.functional.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skipped.pop()], dim=1))
        logits: torch.Tensor = self.head(x)
        return logits.flatten(2).transpose(1, 2)


def unet(layers: int) -> Network:
    """U-Net (Ronneberger et al. 2015) with norms of groups: a class for each of 16×16 pixels."""
    return vision(_UNet((8, 16, 32)), 16)


def clip(layers: int) -> Network:
    """CLIP (Radford et al. 2021): each image with each text, scaled by a scalar parameter.

    The loss is that of the images, whose classes are the texts of the batch.
    """
    common = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config={**common, "vocab_size": VOCAB, "max_position_embeddings": 64, **ids()},
        vision_config={**common, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    inputs, dims = tokens("input_ids")
    seen, open_dims = images(32)
    return Network(
        transformers.CLIPModel(config),
        {**inputs, **seen},
        {**dims, **open_dims},
        outputs=("logits_per_image",),
        labels=BATCH,
        integers={"input_ids": TOKENS},
    )


def detr(layers: int) -> Network:
    """DETR (Carion et al. 2020): classes of six queries; the norms of its ResNet are frozen."""
    seen = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        backbone_config=seen, use_timm_backbone=False, use_pretrained_backbone=False,
        num_queries=6, d_model=WIDTH, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH, dropout=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return vision(transformers.DetrForObjectDetection(config), 96)


def whisper(layers: int) -> Network:
    """Whisper (Radford et al. 2022): two convolutions over 16 mel bands, then as BART."""
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=WIDTH, num_mel_bins=16, max_source_positions=20,
        max_target_positions=64, encoder_layers=layers, decoder_layers=layers,
        encoder_ffn_dim=3 * WIDTH, decoder_ffn_dim=3 * WIDTH, encoder_attention_heads=4,
        decoder_attention_heads=4, use_cache=False, decoder_start_token_id=2, **ids(),
    )  # fmt: skip
    inputs, dims = tokens("decoder_input_ids")
    inputs = {"input_features": torch.zeros(BATCH, 16, 40), **inputs}
    dims = {"input_features": {0: "batch"}, **dims}
    module = transformers.WhisperForConditionalGeneration(config)
    return Network(module, inputs, dims, integers={"decoder_input_ids": TOKENS})


def wav2vec2(layers: int) -> Network:
    """Wav2vec 2.0 (Baevski et al. 2020): a token for each of 19 frames of 200 samples."""
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * WIDTH, hidden_dropout=0.0, activation_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
        apply_spec_augment=False, conv_dim=(16, 16, 16), conv_stride=(5, 2, 1),
        conv_kernel=(10, 3, 1), num_feat_extract_layers=3, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, **ids(),
    )  # fmt: skip
    inputs = {"input_values": torch.zeros(BATCH, 200)}
    return Network(transformers.Wav2Vec2ForCTC(config), inputs, {"input_values": {0: "batch"}})


NETWORKS = (
    vit, resnet50, convnext, whisper, vit_mae, swin, segformer, efficientnet, convnextv2, unet,
    clip, detr, wav2vec2,
)  # fmt: skip
