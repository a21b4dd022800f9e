// A badge in the lower corner that says whether calls are accelerated. A click opens the status.

(function() {
    const PERIOD = 2000;
    let badge = null;
    let panel = null;
    let timer = null;

    // parts with plans of their own, which another extension's forward calls
    function inParts(accelerator) {
        return (accelerator.parts || []).filter((part) => part.plans > 0);
    }

    function words(status) {
        if (!status.enabled) {
            return ['off', 'Stable Fast: off'];
        }
        // an idle accelerator still has plans, but another extension's forward does not call them
        const accelerators = status.accelerators.filter((accelerator) => !accelerator.idle);
        const plans = accelerators.flatMap((accelerator) => accelerator.plans || []);
        // between jobs the memory of weights and graphs may be freed for the host
        const away = accelerators.some((accelerator) => accelerator.weights && accelerator.weights.away);
        if (away || plans.some((plan) => plan.state === 'replaying')) {
            return ['on', 'Stable Fast: accelerated'];
        }
        if (accelerators.some((accelerator) => inParts(accelerator).length > 0)) {
            return ['on', 'Stable Fast: accelerated, block by block'];
        }
        if (plans.length > 0) {
            return ['on', 'Stable Fast: accelerated, no CUDA graph'];
        }
        return ['waiting', Object.keys(status.reasons).length > 0 ? 'Stable Fast: bypassed' : 'Stable Fast: ready'];
    }

    function line(parent, text, bold) {
        const element = document.createElement('div');
        // textContent, never innerHTML: reasons carry names of models and of other extensions
        element.textContent = text;
        element.style.fontWeight = bold ? 'bold' : 'normal';
        parent.appendChild(element);
    }

    function milliseconds(value) {
        return typeof value === 'number' ? value.toFixed(1) + ' ms' : '–';
    }

    function fill(status) {
        panel.textContent = '';
        line(panel, 'Stable Fast ' + status.version, true);
        line(panel, [status.environment.gpu || 'no GPU', 'torch ' + status.environment.torch, status.model || 'no model'].join(' · '));
        for (const accelerator of status.accelerators) {
            if (accelerator.idle) {
                line(panel, accelerator.name + ': ' + accelerator.idle, true);
            }
            const parts = inParts(accelerator);
            if (parts.length > 0) {
                const calls = parts.reduce((sum, part) => sum + part.replays, 0);
                line(panel, accelerator.name + ': ' + parts.length + ' blocks, one by one · ' + calls + ' calls', true);
            }
            for (const plan of accelerator.plans || []) {
                line(panel, plan.signature, true);
                line(panel, [
                    plan.state,
                    milliseconds(plan.ms_before) + ' → ' + milliseconds(plan.ms_after),
                    plan.replays + ' calls',
                    plan.captures + (plan.captures === 1 ? ' capture' : ' captures')
                ].join(' · '));
            }
        }
        const reasons = Object.entries(status.reasons);
        if (reasons.length > 0) {
            line(panel, 'Bypassed calls in the last images', true);
            reasons.forEach(([reason, count]) => line(panel, count + ' × ' + reason));
        }
        if (status.last_error) {
            line(panel, 'Last error', true);
            line(panel, status.last_error.stage + ': ' + status.last_error.message);
        }
    }

    async function refresh() {
        try {
            const answer = await fetch('./sfast/v1/status');
            if (answer.status === 401) {
                badge.dataset.state = 'unknown';
                badge.textContent = 'Stable Fast: log in for status';
                return;
            }
            if (!answer.ok) {
                throw new Error(String(answer.status));
            }
            const status = await answer.json();
            const [state, text] = words(status);
            badge.dataset.state = state;
            badge.textContent = text;
            if (!panel.hidden) {
                fill(status);
            }
        } catch (error) {
            badge.dataset.state = 'unknown';
            badge.textContent = 'Stable Fast: no status';
        }
    }

    function toggle() {
        panel.hidden = !panel.hidden;
        clearInterval(timer);
        timer = null;
        if (!panel.hidden) {
            // only while the page is visible
            timer = setInterval(() => {
                if (!document.hidden) {
                    refresh();
                }
            }, PERIOD);
            panel.style.bottom = `${window.innerHeight - badge.getBoundingClientRect().top + 4}px`;
        }
        refresh();
    }

    // SD.Next's themes have 'none' where others have a colour, or a transparent one
    function cover(element) {
        const [, , , alpha = '1'] = getComputedStyle(element).backgroundColor.match(/[\d.]+/g) || [];
        if (Number(alpha) < 1) {
            Object.assign(element.style, {background: '#2b2b2b', color: '#f0f0f0'});
        }
    }

    function style(element, bottom) {
        Object.assign(element.style, {
            position: 'fixed',
            left: '8px',
            bottom: bottom,
            // above the results of SD.Next's modern UI on a phone (999), below an image at full size (1001)
            zIndex: '1000',
            padding: '2px 8px',
            borderRadius: '6px',
            fontSize: '12px',
            background: 'var(--sd-main-background-color, var(--background-fill-secondary, #333))',
            color: 'var(--sd-label-color, var(--body-text-color, #eee))',
            border: '1px solid var(--border-color-primary, #666)'
        });
    }

    onUiLoaded(() => {
        if (badge) {
            return;
        }
        badge = document.createElement('button');
        badge.id = 'stable_fast_badge';
        badge.type = 'button';
        badge.title = 'Stable Fast status; click for details';
        style(badge, '8px');
        badge.addEventListener('click', toggle);
        panel = document.createElement('div');
        panel.id = 'stable_fast_panel';
        panel.hidden = true;
        style(panel, '36px');
        Object.assign(panel.style, {maxWidth: 'min(40em, 100vw - 16px)', maxHeight: '60vh', overflow: 'auto', whiteSpace: 'pre-wrap'});
        const root = gradioApp();
        (root === document ? document.body : root).append(panel, badge);
        [badge, panel].forEach(cover);
        refresh();
    });

    // not every host has it
    if (typeof onOptionsChanged === 'function') {
        onOptionsChanged(() => {
            if (badge) {
                refresh();
            }
        });
    }
})();
