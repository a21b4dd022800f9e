// Names for screen readers: gradio gives none to numbers next to sliders.

(function() {
    function nameNumbers() {
        document.querySelectorAll('[id^="setting_sfast_"] input[type="number"]').forEach((input) => {
            const setting = input.closest('[id^="setting_sfast_"]');
            const label = setting.querySelector('label');
            if (label && !input.hasAttribute('aria-labelledby')) {
                label.id = label.id || `${setting.id}_label`;
                input.setAttribute('aria-labelledby', label.id);
            }
        });
    }

    onUiLoaded(nameNumbers);
})();
