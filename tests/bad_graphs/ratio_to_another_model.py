"""Samples of a teacher, and a ratio of the student that would begin at the teacher.

error: ProvenanceError
node: update
message: node 'update' trains model 'student' by its ratio to another model, 'teacher'
"""

import flowrl as fl
from flowrl import advantages, losses

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@fl.graph
def off_policy(lr: float = 1e-6):
    teacher = fl.Model("model", name="teacher")
    student = fl.Model("model", optimizer=fl.AdamW(lr=lr), name="student")
    prompts = fl.prompts(ROWS, batch=8)
    samples = fl.rollout(teacher, prompts, n=4, max_new_tokens=64)
    advantage = advantages.grpo(samples, exact_match(samples))
    fl.update(student, samples, advantage, loss=losses.ppo_clip())  # here
