-- Share of rejected tokens (rho_mask) by entropy bin (its lower border, nats) and lag.
select
    entropy_bin, lag,
    count(*) as tokens,
    avg((not kept)::int) as rho_mask,
    avg(abs(log_ratio)) as mean_abs_log_ratio
from trained_tokens
group by entropy_bin, lag
order by entropy_bin, lag
