-- E[log_ratio^2] by entropy + 0.01, in bins a factor of 2 wide. A trust region that scales with the
-- entropy supposes that second_moment / (entropy + 0.01) is the same in all of them.
select
    pow(2, bin) as above,
    pow(2, bin + 1) as up_to,
    count(*) as tokens,
    avg(behavior_entropies) as entropy,
    avg(log_ratio * log_ratio) as second_moment,
    avg(log_ratio * log_ratio) / (avg(behavior_entropies) + 0.01) as against_entropy,
    avg((not kept)::int) as rho_mask
from (
    select *, floor(log2(not_negative(behavior_entropies) + 0.01)) as bin
    from trained_tokens
)
group by bin
order by bin
