"""The example, broken: rows are scratch, although prefixes may end inside a pool."""

import dataclasses

import example


class Config(example.Config):
    @classmethod
    def construct_kv_params(cls, *args, **options):
        params = super().construct_kv_params(*args, **options)
        ring = params.children["ring"]
        ring.regions = tuple(
            dataclasses.replace(region, scratch=True) for region in ring.regions
        )
        return params


class Model(example.Model):
    model_config_cls = Config


ARCHITECTURES = [example.architecture(Config, Model)]
