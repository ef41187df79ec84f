-- Tokens of the very weights that are trained: what differs here is not staleness but arithmetic
-- (sampler against trainer), and ought to be rounding.
select
    entropy_bin,
    count(*) as tokens,
    avg(log_ratio) as mean_log_ratio,
    max(abs(log_ratio)) as max_abs_log_ratio,
    approx_quantile(abs(log_ratio), 0.5) as p50_abs_log_ratio,
    approx_quantile(abs(log_ratio), 0.99) as p99_abs_log_ratio
from trained_tokens
where lag = 0
group by entropy_bin
order by min(behavior_entropies)
