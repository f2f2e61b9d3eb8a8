"""GLM-4.7-Flash: the layers of DeepSeek-V3, the first of them dense unless the file says otherwise."""

from models import deepseek_v3
from models.blocks.config import RawConfig
from models.blocks.spec import DecoderSpec


def read_decoder(raw: RawConfig) -> DecoderSpec:
    num_dense = raw.integer("first_k_dense_replace", 1, minimum=0)
    return deepseek_v3.read_decoder(raw.updated({"first_k_dense_replace": num_dense}))
