"""A limit on the mismatch of samples that the trained model has not sampled.

error: WrongType
node: update
message: node 'update': max_mismatch has nothing to hold to
"""

import flowrl as fl
from flowrl import losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.graph
def distil(lr: float = 1e-6):
    teacher = fl.Model("model", name="teacher")
    student = fl.Model("model", optimizer=fl.AdamW(lr=lr), name="student")
    samples = fl.rollout(teacher, fl.prompts(ROWS, batch=8), n=4, max_new_tokens=64)
    fl.update(student, samples, loss=losses.sft(), max_mismatch=0.1)  # here
