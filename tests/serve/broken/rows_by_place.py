"""The example, broken: a request's ring row is found by its place in the batch.

Every row is one that MAX gave to this batch, and none is used twice, so nothing can
notice. It goes right until requests come and go.
"""

import example
import numpy as np


class Model(example.Model):
    def execute(self, model_inputs):
        for rows in example.ring_rows(model_inputs):
            rows[:] = np.sort(rows, axis=1)
        return super().execute(model_inputs)


ARCHITECTURES = [example.architecture(example.Config, Model)]
