"""Networks of MONAI for medical images and volumes, with few channels."""

from collections.abc import Iterable

import torch

from benchmarks.pages.zoo_models.recipe import Entry, Recipe, floats, recipes_of

ROUGH = (4, 8, 16)
TWICE = (2, 2)
VOLUME = floats((2, 1, 16, 16, 16))
SLICE = floats((2, 1, 32, 32))
TIMES = lambda: (torch.rand(2, 1, 16, 16), torch.tensor([3, 7]))  # noqa: E731
VIT = {"hidden_size": 32, "mlp_dim": 64, "num_layers": 2, "num_heads": 2}
DIFFUSION = {
    "num_res_blocks": 1,
    "channels": (8, 16),
    "attention_levels": (False, True),
    "norm_num_groups": 4,
    "num_head_channels": 8,
}
AUTOENCODER = {"num_res_blocks": 1, "channels": (8, 16), "attention_levels": (False, True), "norm_num_groups": 4}
MEDNEXT = {"init_filters": 4, "kernel_size": 3, "blocks_down": (1,) * 4, "blocks_bottleneck": 1, "blocks_up": (1,) * 4}
VQVAE = {
    "channels": (8, 16),
    "num_res_layers": 1,
    "num_res_channels": (8, 16),
    "downsample_parameters": ((2, 4, 1, 1),) * 2,
    "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
    "num_embeddings": 16,
    "embedding_dim": 8,
}
SENET = {"reduction": 4, "dropout_prob": None, "inplanes": 16, "num_classes": 2}
DYNUNET = ([3, 3, 3], [1, 2, 2], [2, 2])
MODELS = {
    "unet_3d": Entry(lambda n: n.UNet(3, 1, 2, ROUGH, TWICE), VOLUME),
    "unet_2d_residual": Entry(lambda n: n.UNet(2, 1, 2, ROUGH, TWICE, num_res_units=2, norm="batch"), SLICE),
    "attention_unet": Entry(lambda n: n.AttentionUnet(3, 1, 2, ROUGH, TWICE), VOLUME),
    "autoencoder": Entry(lambda n: n.AutoEncoder(3, 1, 1, ROUGH, (2, 2, 2), num_res_units=1), VOLUME),
    "autoencoder_kl": Entry(lambda n: n.AutoencoderKL(2, **AUTOENCODER), SLICE),
    "basic_unet": Entry(lambda n: n.BasicUNet(3, features=(4, 4, 8, 8, 16, 4)), floats((2, 1, 32, 32, 32))),
    "basic_unet_plus_plus": Entry(lambda n: n.BasicUNetPlusPlus(2, features=(4, 4, 8, 8, 16, 4)), SLICE),
    "classifier": Entry(lambda n: n.Classifier((1, 32, 32), 5, ROUGH, (2, 2, 2)), SLICE),
    "controlnet": Entry(
        lambda n: n.ControlNet(2, 1, conditioning_embedding_num_channels=(8, 16), **DIFFUSION),
        lambda: (torch.rand(2, 1, 16, 16), torch.tensor([3, 7]), torch.rand(2, 1, 32, 32)),
    ),
    "critic": Entry(lambda n: n.Critic((1, 32, 32), ROUGH, (2, 2, 2)), SLICE),
    "decoder_only_transformer": Entry(
        lambda n: n.DecoderOnlyTransformer(50, 12, 32, 2, 2), lambda: (torch.randint(50, (2, 12)),)
    ),
    "densenet_3d": Entry(
        lambda n: n.DenseNet(3, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2)), floats((2, 1, 32, 32, 32))
    ),
    "diffusion_unet": Entry(lambda n: n.DiffusionModelUNet(2, 1, 1, **DIFFUSION), TIMES),
    "discriminator": Entry(lambda n: n.Discriminator((1, 32, 32), ROUGH, (2, 2, 2)), SLICE),
    "dynunet": Entry(lambda n: n.DynUNet(3, 1, 2, *DYNUNET, filters=[4, 8, 16]), VOLUME),
    "dynunet_residual_deep": Entry(
        lambda n: n.DynUNet(
            2,
            1,
            2,
            [3, 3, 3, 3],
            [1, 2, 2, 2],
            [2, 2, 2],
            filters=[4, 8, 16, 16],
            res_block=True,
            deep_supervision=True,
        ),
        SLICE,
    ),
    "efficientnet_3d": Entry(
        lambda n: n.EfficientNetBN("efficientnet-b0", False, spatial_dims=3, in_channels=1), floats((2, 1, 32, 32, 32))
    ),
    "flexible_unet": Entry(
        lambda n: n.FlexibleUNet(1, 2, "resnet18", decoder_channels=(32, 16, 8, 8, 8)), floats((2, 1, 64, 64))
    ),
    "fully_connected": Entry(lambda n: n.FullyConnectedNet(16, 4, (32, 32)), floats((4, 16))),
    "generator": Entry(lambda n: n.Generator((8,), (8, 4, 4), (16, 8, 1), (2, 2, 2)), floats((2, 8))),
    "globalnet": Entry(lambda n: n.GlobalNet([16, 16, 16], 3, 1, 4, 2), VOLUME),
    "highresnet": Entry(lambda n: n.HighResNet(3), VOLUME),
    "hovernet": Entry(lambda n: n.HoVerNet("fast", out_classes=3), floats((1, 3, 256, 256))),
    "localnet": Entry(lambda n: n.LocalNet(3, 1, 4, (0, 1)), VOLUME),
    "mil": Entry(lambda n: n.MILModel(2, "att_trans", False, "resnet18"), floats((2, 3, 3, 64, 64))),
    "masked_autoencoder": Entry(
        lambda n: n.MaskedAutoEncoderViT(
            1,
            32,
            8,
            spatial_dims=2,
            decoder_hidden_size=32,
            decoder_mlp_dim=64,
            decoder_num_layers=1,
            decoder_num_heads=2,
            **VIT,
        ),
        SLICE,
    ),
    "mednext": Entry(lambda n: n.MedNeXt(3, **MEDNEXT), floats((2, 1, 32, 32, 32))),
    "mednext_2d_response_norm": Entry(
        lambda n: n.MedNeXt(2, global_resp_norm=True, use_residual_connection=True, **MEDNEXT), SLICE
    ),
    "multi_scale_patch_discriminator": Entry(
        lambda n: n.MultiScalePatchDiscriminator(2, 2, 2, 8, 1, minimum_size_im=32), SLICE
    ),
    "patch_discriminator": Entry(lambda n: n.PatchDiscriminator(3, 4, 1, num_layers_d=2), floats((2, 1, 32, 32, 32))),
    "quicknat": Entry(lambda n: n.Quicknat(4, num_filters=8), SLICE),
    "regunet": Entry(lambda n: n.RegUNet(3, 1, 4, 2), VOLUME),
    "regressor": Entry(lambda n: n.Regressor((1, 32, 32), (2,), ROUGH, (2, 2, 2)), SLICE),
    "resnet_3d": Entry(
        lambda n: n.ResNet("basic", [1, 1, 1, 1], [8, 16, 16, 32], n_input_channels=1, num_classes=5),
        floats((2, 1, 32, 32, 32)),
    ),
    "senext": Entry(
        lambda n: n.SENet(2, 1, "se_resnetxt_bottleneck", [1, 1, 1, 1], 8, **SENET), floats((2, 1, 64, 64))
    ),
    "spadenet": Entry(
        lambda n: n.SPADENet(2, 1, 1, 3, [32, 32], [16, 8], is_vae=False, spade_intermediate_channels=8),
        floats((2, 3, 32, 32), (2, 1, 32, 32)),
    ),
    "segresnet": Entry(lambda n: n.SegResNet(3), VOLUME),
    "segresnet_ds": Entry(lambda n: n.SegResNetDS(3, init_filters=8, blocks_down=(1, 1, 1)), VOLUME),
    "segresnet_ds2": Entry(lambda n: n.SegResNetDS2(3, init_filters=8, blocks_down=(1, 1, 1)), VOLUME),
    "segresnet_vae": Entry(lambda n: n.SegResNetVAE((16, 16, 16)), VOLUME),
    "swin_unetr": Entry(
        lambda n: n.SwinUNETR(1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), feature_size=12, spatial_dims=2),
        floats((1, 1, 64, 64)),
    ),
    "swin_unetr_v2_3d": Entry(
        lambda n: n.SwinUNETR(
            1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), window_size=2, feature_size=12, use_v2=True
        ),
        floats((1, 1, 64, 64, 64)),
    ),
    "unetr": Entry(
        lambda n: n.UNETR(1, 2, (32, 32), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=2, spatial_dims=2),
        SLICE,
    ),
    "vnet_2d": Entry(lambda n: n.VNet(2), SLICE),
    "vnet": Entry(lambda n: n.VNet(3), VOLUME),
    "vqvae": Entry(lambda n: n.VQVAE(2, 1, 1, **VQVAE), SLICE),
    "var_autoencoder": Entry(lambda n: n.VarAutoEncoder(2, (1, 32, 32), 1, 8, ROUGH, (2, 2, 2)), SLICE),
    "vit_3d": Entry(lambda n: n.ViT(1, (16, 16, 16), (8, 8, 8), classification=True, **VIT), VOLUME),
    "vit_autoencoder": Entry(lambda n: n.ViTAutoEnc(1, (32, 32), (4, 4), spatial_dims=2, **VIT), SLICE),
    "voxelmorph": Entry(
        lambda n: n.VoxelMorph(n.VoxelMorphUNet(3, 2, 4, (4, 4, 8, 8), (4, 4))),
        floats((1, 1, 16, 16, 16), (1, 1, 16, 16, 16)),
    ),
    "voxelmorph_unet": Entry(lambda n: n.VoxelMorphUNet(2, 2, 4, (4, 4, 8, 8), (4, 4)), floats((1, 2, 32, 32))),
    "ahnet": Entry(lambda n: n.AHNet((1, 1, 1, 1), psp_block_num=2), floats((2, 1, 32, 32, 32))),
}


def monai_recipes() -> Iterable[Recipe]:
    """Return a recipe for each network, or none if MONAI is not installed."""
    return recipes_of("monai", "monai.networks.nets", MODELS)
