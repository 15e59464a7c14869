"""The published numbers this project is measured against, in one place; arXiv:2610.06647.

Single node, 8 × H100 80 GB: four GPUs train under FSDP, four generate. Qwen models of 1.5B to 27B,
DAPO-Math for training, MATH-500 and Reasoning-Gym for evaluation. None of it was measured here.
"""

SOURCE = "arXiv:2610.06647"

# Average training memory per GPU in GiB, accuracies in percent, times in milliseconds.
PUBLISHED: dict[str, float] = {
    "gib_1_5b_adam": 9.18,
    "gib_1_5b_logra": 7.18,
    "saved_1_5b": 22,
    "gib_1_5b_lora": 13.2,  # over the first 300 steps,
    "gib_1_5b_logra_300": 7.2,  # as this is
    "gib_7b_adam": 31.82,
    "gib_7b_logra": 17.29,
    "saved_7b": 45.7,
    "pass_7b_adam": 72.33,  # peak Pass@1 on MATH-500
    "pass_7b_logra": 72.48,
    "gib_27b_logra": 51.5,
    "steps_27b": 1100,
    "score_27b_before": 40,  # verifier score on Reasoning-Gym Hard
    "score_27b_after": 66,
    "rank": 256,
    "rank_low": 4,  # of the ablation
    "update_ratio": 6e-5,
    "kl_start": 2e-4,
    "kl_end": 2e-5,
    "kl_steps": 300,
    "alpha_max": 3,
    "beta2": 0.95,
    "probe_tokens": 4096,
    "mismatch_decay": 0.7,  # of the running gap between rollout and trainer,
    "mismatch_gain": 0.3,  # and the share of the newest
    "gpus": 8,
    "gpu_gb": 80,
    "gib_7b_weights": 14,  # GB: bfloat16 weights of a 7B model,
    "gib_7b_moments": 56,  # and Adam's two float32 moments
    # An independent public port: GRPO, Qwen2.5-Math-7B, 8 × A100, no KL control.
    "port_gib_adam": 36.13,
    "port_gib_logra": 19.36,
    "port_ms_adam": 500,  # a step on B300
    "port_ms_logra": 384,
}
