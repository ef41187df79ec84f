-- Tokens of the very weights that are trained: what differs here is not staleness but arithmetic
-- (sampler against trainer), and ought to be rounding.
select
    entropy_bin,
    count(*) as tokens,
    avg(log_ratio) as mean_log_ratio,
    max(abs(log_ratio)) as max_abs_log_ratio,
    avg((abs(log_ratio) > 1e-4)::int) as share_above_1e_4,
    avg((abs(log_ratio) > 1e-2)::int) as share_above_1e_2
from trained_tokens
where lag = 0
group by entropy_bin
order by entropy_bin
