-- E[log_ratio^2] by entropy, in 20 equal parts, beside what a trust region of tau = 1 allows.
with parts as (
    select
        ntile(20) over (order by behavior_entropies) as part,
        behavior_entropies, log_ratio, kept
    from (from trained_tokens using sample 1000000 rows (reservoir, 0))
)
select
    part,
    count(*) as tokens,
    avg(behavior_entropies) as entropy,
    avg(log_ratio * log_ratio) as second_moment,
    avg(log_ratio * log_ratio) / (avg(behavior_entropies) + 0.01) as against_entropy,
    avg((not kept)::int) as rho_mask
from parts
group by part
order by part
