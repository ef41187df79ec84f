-- The 50 tokens that lie furthest outside what entropy explains: the highest scores.
select
    step, group_id, trajectory, position, token_ids as token_id, lag,
    behavior_logprobs as behavior_logprob, policy_logprobs as policy_logprob,
    behavior_entropies as entropy, log_ratio, score, advantage, kept
from trained_tokens
order by score desc, step, trajectory, position
limit 50
