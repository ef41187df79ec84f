"""The laboratory: the claims of the paper re-measured on one core, in seconds to a minute a run.

    experiments/NAME   jobs and what to make of their figures              (`estr lab NAME`)
       sweep           jobs -> processes -> cache -> one tidy table
          training     one run: rollouts under an imposed staleness, the real trainer
             rollouts  all rollouts of a step at once
             staleness which version draws which token
             decoder   a small decoder as a function of its weights
             arithmetic  what the sampler computes in
       statistics      paired Student's t, Holm, verdicts

Nothing of the method itself stands here: log-probs, corrections, losses, advantages, batches, the
trainer and the tasks are those of every other run. See docs/lab.
"""
